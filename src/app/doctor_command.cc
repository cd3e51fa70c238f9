
#include <iostream>
#include <memory>

#include "app/cli/commands.h"
#include "app/cli/option_checks.h"
#include "app/cluster/doctor_cluster.h"
#include "base/version.h"
#include "device/cuda.h"
#include "ops/runtime/inventory.h"
#include "run/record/metrics.h"
#include "run/record/run_info.h"
#include "tensor/parallel.h"

namespace tessera {
namespace {

void print_gpus(const cuda::Inventory& inventory) {
  for (std::size_t i = 0; i < inventory.gpus.size(); ++i) {
    const cuda::GpuInfo& gpu = inventory.gpus[i];
    const std::string links = gpu.num_nvlinks < 0 ? "" : fmt::format(", {} NVLinks", gpu.num_nvlinks);
    std::cout << fmt::format("GPU {}:     {}, compute capability {}.{}, {} SMs, {} of memory, {} of it free{}\n", i,
                             gpu.name, gpu.major, gpu.minor, gpu.num_sms, format_gib(gpu.total_bytes),
                             format_gib(gpu.free_bytes), links);
  }
  if (inventory.gpus.size() < 2) return;
  if (inventory.without_peer_access.empty()) {
    std::cout << "peers:     every GPU can store to every other's memory\n";
  }
  for (const auto& [a, b] : inventory.without_peer_access) {
    std::cout << fmt::format("peers:     GPUs {} and {} cannot store to each other's memory\n", a, b);
  }
}

void doctor() {
  std::cout << fmt::format("tessera:   {}\n", version());
  std::cout << fmt::format("processor: {}, {} cores, {} of memory\n", processor_name(), num_cores(),
                           format_gib(machine_memory_bytes()));
  const cuda::Inventory inventory = cuda::take_inventory();
  if (!inventory.driver.empty()) std::cout << fmt::format("driver:    {}\n", inventory.driver);
  for (const cuda::LibraryInfo& library : inventory.libraries) {
    if (library.problem.empty()) std::cout << fmt::format("{:<10} {}\n", library.name + ":", library.version);
  }
  print_gpus(inventory);
  std::cout << fmt::format("computes:  on {}\n", cuda::available() ? "a GPU (training.device = \"auto\")" : "the CPU");
  if (!cuda::available()) std::cout << fmt::format("no GPU:    {}\n", cuda::why_unavailable());
  for (const cuda::LibraryInfo& library : inventory.libraries) {
    if (!library.problem.empty()) std::cout << fmt::format("missing:   {}\n", library.problem);
  }
}

}  // namespace

void add_doctor_command(CLI::App& app, int& status) {
  struct Options {
    bool for_cluster = false, meets_ranks = false;
    std::string token;
    ClusterDoctorOptions cluster;
  };
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("doctor", "Say what this machine has to compute with, and what is missing");
  CLI::Option* cluster =
      command->add_flag("--cluster", options->for_cluster,
                        "Ask all nodes, start ranks on them, and say what does not fit; exit status 1 if a run would "
                        "fail");
  add_engine_options(*command, options->cluster.engine);
  command->add_option("--ranks-per-node", options->cluster.ranks_per_node, "Ranks that are started; default: 1")
      ->transform(as_count(1));
  command->add_option("--folder", options->cluster.folders,
                      "A folder that all nodes should share, as for datasets and runs; may be given several times");
  for (const char* of_cluster : {"--engine", "--hosts", "--starter-option", "--ranks-per-node"}) {
    command->get_option(of_cluster)->needs(cluster);
  }
  // --cluster starts these on nodes.
  command->add_option("--node-facts", options->token)->group("");
  command->add_flag("--meet-ranks", options->meets_ranks)->group("");
  command->footer(
      "For example\n"
      "  tessera doctor --cluster --hosts n1,n2,n3 --ranks-per-node 8 --folder /shared/runs\n"
      "  salloc -N4 --exclusive tessera doctor --cluster --folder /shared/runs");
  command->callback([options, &status] {
    require(options->for_cluster || !options->token.empty() || options->cluster.folders.empty(),
            "--folder needs --cluster");
    if (options->for_cluster) {
      status = examine_cluster(options->cluster);
    } else if (!options->token.empty()) {
      print_node_facts(options->cluster.folders, options->token);
    } else if (options->meets_ranks) {
      meet_ranks();
    } else {
      doctor();
    }
  });
}

}  // namespace tessera
