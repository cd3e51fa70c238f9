#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <memory>

#include "app/cli/arguments.h"
#include "app/cli/commands.h"
#include "app/cli/config_arguments.h"
#include "app/cli/engine_options.h"
#include "app/cli/launch_line.h"
#include "app/cli/option_checks.h"
#include "app/cli/signals.h"
#include "base/error.h"
#include "device/cuda.h"
#include "launch/launcher.h"
#include "launch/watch/monitor.h"

namespace tessera {
namespace {

struct LaunchArguments {
  EngineOptions engine;
  int num_nodes = 0, num_spares = 0, ranks_per_node = 0;
  std::vector<std::string> command;
  LauncherOptions options;
};

/// Returns the configuration of "train CONFIG --section.key=value ...".
JobConfig config_of(const std::vector<std::string>& command) {
  require(!command.empty() && command.front() == "train",
          "tessera launch: expected the training command behind '--', as in -- train CONFIG --section.key=value, got "
          "{}",
          command.empty() ? "nothing" : fmt::format("'{}'", command.front()));
  CLI::App app("", "tessera launch --");
  const ConfigArguments arguments(app.add_subcommand("train"));
  try {
    app.parse(checked_arguments(app, command));
  } catch (const CLI::ParseError& error) {
    fail("tessera launch: the training command cannot be read: {}", error.what());
  }
  return arguments.read();
}

/// Returns how many ranks a node gets without --ranks-per-node. Throws Error if this machine does not show it.
std::int64_t default_ranks_per_node(const JobConfig& config, const Engine& engine, const LauncherOptions& options) {
  const std::string why_no_gpu = config.why_no_gpu(1);
  require(engine.is_one_machine() || config.training.device == DeviceChoice::kCpu || why_no_gpu.empty(),
          "this machine cannot show how many GPUs the nodes have ({}): give --ranks-per-node, or --training.device=cpu "
          "behind '--'",
          why_no_gpu);
  if (config.device(1) == Device::kCuda) return cuda::num_devices();
  return (fewest_ranks(config.mesh_degrees()) + options.num_nodes - 1) / options.num_nodes;
}

int run_launch(LaunchArguments& arguments) {
  JobConfig config = config_of(arguments.command);
  require(config.job.attempt == 0 && config.job.node_folder.empty(),
          "tessera launch sets job.attempt and job.node_folder (--node-folder) itself: leave them out");
  config.job.node_folder = "/dev/shm";  // any folder, for the check only: the launcher chooses it
  config.validate();
  std::unique_ptr<Engine> engine = make_engine(arguments.engine);
  require(!engine->is_one_machine() || (arguments.num_nodes <= 1 && arguments.num_spares == 0),
          "--nodes {} --spares {}, but there is one machine: give --hosts, or start in a job of Slurm",
          arguments.num_nodes, arguments.num_spares);
  LauncherOptions& options = arguments.options;
  require(!options.grows || engine->name() == "slurm",
          "--grow asks Slurm for nodes, but the engine is {}: leave it out", engine->name());
  require(options.node_folder.empty() || options.node_folder.filename().string().starts_with("tessera-"),
          "--node-folder is '{}': the launch deletes this folder at its end, so its name must begin with 'tessera-'",
          options.node_folder.string());
  const int all_nodes = static_cast<int>(engine->nodes().size());
  options.num_nodes = arguments.num_nodes > 0 ? arguments.num_nodes : std::max(1, all_nodes - arguments.num_spares);
  options.num_spares = arguments.num_spares;
  const std::int64_t per_node =
      arguments.ranks_per_node > 0 ? arguments.ranks_per_node : default_ranks_per_node(config, *engine, options);
  require(per_node <= kMaxRanks / options.num_nodes, "{} nodes of {} ranks; expected at most {} ranks",
          options.num_nodes, per_node, kMaxRanks);
  options.ranks_per_node = static_cast<int>(per_node);
  const int num_ranks = options.num_nodes * options.ranks_per_node;
  const std::string lack = lack_of_ranks(config, num_ranks);
  require(lack.empty(), "--nodes {} and --ranks-per-node {} make too few ranks: {}. Give more of either",
          options.num_nodes, options.ranks_per_node, lack);
  config.validate_on(resolve(config.mesh_degrees(), num_ranks));
  options.program = std::filesystem::read_symlink("/proc/self/exe").string();
  options.arguments = arguments.command;
  return launch(options, config, std::move(engine), count_stop_signals());
}

}  // namespace

void add_launch_command(CLI::App& app, int& status) {
  auto arguments = std::make_shared<LaunchArguments>();
  LauncherOptions& options = arguments->options;
  CLI::App* command = app.add_subcommand("launch", "Train on one or many nodes, and heal the run when one fails");
  add_engine_options(*command, arguments->engine);
  command->add_option("--nodes", arguments->num_nodes, "Nodes that train; default: all but the spares")
      ->transform(as_count(1));
  command->add_option("--spares", arguments->num_spares, "Nodes that wait to take the place of one that fails")
      ->transform(as_count());
  command
      ->add_option("--ranks-per-node", arguments->ranks_per_node,
                   "Default: one per GPU of this machine; on CPUs as few as the mesh needs")
      ->transform(as_count(1));
  command->add_option("--address", options.address, "Name or address of this machine for the nodes; default: its name");
  command->add_option("--node-folder", options.node_folder,
                      "Folder on each node's tmpfs for the ranks' files and copies in memory; its name begins with "
                      "tessera-, and the launch deletes it at its end; default: /dev/shm/tessera-RUN");
  command->add_option("--prometheus-address", options.prometheus_address,
                      "HOST:PORT to serve the launch's metrics for Prometheus at; default: none");
  command->add_option("--health-folder", options.health_folder,
                      fmt::format("Where tessera health serve writes on each node; default: {}", kHealthFolder));
  command->add_flag("--grow", options.grows,
                    "Ask Slurm for a node while there are fewer spares than --spares; it may start without any");
  command->add_option("--health-rates", options.health_rates,
                      "Folder of tessera health check --rates: a node that was slow is checked against its peers");
  command->add_option("--restarts-per-hour", options.restarts_per_hour, "The launcher stops after more; default: 10")
      ->transform(as_count());
  command
      ->add_option("--node-timeout", options.watch.node_timeout,
                   "Seconds of silence after which a node is lost; default: 4. A monitor ends its ranks after 10")
      ->check(is_number(0.1, 8.0));
  command
      ->add_option("--hang-timeout", options.watch.hang_floor,
                   "Seconds in a step that count as a hang if they are also 3 usual steps; default: 5")
      ->check(is_number(0.1, 1e6));
  command
      ->add_option("--slow-factor", options.watch.slow_factor,
                   "A rank that computes so many times as long as the others is slow; default: 1.5")
      ->check(is_number(1.0, 1e6));
  command->add_option("command", arguments->command, "-- train CONFIG --section.key=value ...");
  command->footer(
      "For example\n"
      "  tessera launch --hosts n1,n2,n3,n4 --spares 1 --ranks-per-node 8 -- train configs/16b-8gpu.toml\n"
      "docs/resilience.md says what is done about which failure. tessera status RUN shows a run from outside.");
  command->callback([arguments, &status] { status = run_launch(*arguments); });
}

void add_monitor_command(CLI::App& app, int& status) {
  auto options = std::make_shared<MonitorOptions>();
  CLI::App* command = app.add_subcommand("monitor", "Watch the ranks of a node; tessera launch starts it");
  command->add_option("--node", options->node)->required();
  command->add_option("--connect", options->endpoint)->required();
  command->add_option("--run-id", options->run_id)->required();
  command->add_option("--health-folder", options->health_folder)->required();
  command->add_option("--folder", options->folder)->required();
  command->group("");  // hides it from --help
  command->callback([options, &status] {
    require(static_cast<bool>(std::getline(std::cin, options->key)),
            "tessera monitor: expected the key of the launch on standard input; tessera launch starts monitors");
    status = run_monitor(*options);
  });
}

}  // namespace tessera
