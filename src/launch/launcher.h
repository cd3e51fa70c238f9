// The launcher starts the ranks of a run on the nodes of an engine and watches them until all steps are done. It heals
// the run when something fails (docs/resilience.md).
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "config/job_config.h"
#include "health/verdict.h"
#include "launch/engines/engine.h"
#include "launch/watch/run_watch.h"
#include "system/child_process.h"

namespace tessera {

struct LauncherOptions {
  int num_nodes = 1, num_spares = 0, ranks_per_node = 1;
  int restarts_per_hour = 10;
  bool grows = false;                 // asks the scheduler for a node while there are fewer spares than num_spares
  std::string address;                // by which nodes reach the launcher; empty: this machine's name
  std::filesystem::path node_folder;  // on each node; empty: /dev/shm/tessera-<run id>
  std::string prometheus_address;     // "HOST:PORT" where metrics are served; empty: nowhere
  std::filesystem::path health_folder = kHealthFolder;  // folder of each node's health daemon
  std::filesystem::path health_rates;  // active checks judge slow nodes by them (health/peer_rates.h); empty: none
  WatchOptions watch;
  std::string program;                 // program of ranks and monitors: the same path on all nodes
  std::vector<std::string> arguments;  // arguments of the ranks, from "train" on
};

/// Runs the launcher. Returns the exit status of `tessera launch`. Throws Error before any rank starts if a node is
/// missing or is not fit, or if the first attempt's ranks cannot be started. Later such an error is a failure to heal.
int launch(const LauncherOptions& options, const JobConfig& config, std::unique_ptr<Engine> engine,
           const volatile StopRequest& stop);

}  // namespace tessera
