#include <fmt/ranges.h>

#include <iostream>
#include <memory>

#include "app/cli/commands.h"
#include "launch/requests.h"

namespace tessera {
namespace {

/// How many seconds to wait. The launcher looks every second, but a network file system may show it a new file half a
/// minute later.
constexpr double kPatience = 60.0;

}  // namespace

void add_undrain_command(CLI::App& app) {
  struct Options {
    std::string run;
    std::vector<std::string> nodes;
  };
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("undrain", "Return drained nodes to a running launch, after their repair");
  command->add_option("run", options->run, "The run's folder (job.dump_folder)")->required();
  command->add_option("nodes", options->nodes, "Nodes that tessera status shows as drained")->required();
  command->callback([options] {
    request_undrain(options->run, options->nodes, kPatience);
    std::cout << fmt::format("returned {}: spares of the run once their old ranks have ended\n",
                             fmt::join(options->nodes, ", "));
  });
}

}  // namespace tessera
