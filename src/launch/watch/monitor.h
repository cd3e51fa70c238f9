// The monitor of a node: a small process that outlives every rank. It tells the launcher what the node's ranks do, from
// their files (comm/observe/rank_file.h), and at once when one of them ends. It ends ranks when the launcher says so,
// or when the launcher has not been heard of for long: a node that was given up must not go on alone.
#pragma once

#include <filesystem>
#include <string>

#include "health/verdict.h"

namespace tessera {

struct MonitorOptions {
  std::string node;      // its name for the launcher
  std::string endpoint;  // of the launcher
  std::string key;       // LauncherChannel::key()
  std::string run_id;
  std::filesystem::path folder;  // job.node_folder of the ranks
  /// Where the node's health daemon writes. Without a daemon nothing is known of the node's health.
  std::filesystem::path health_folder = kHealthFolder;
  /// The monitor ends its ranks if it hears nothing of the launcher for so long. Time in which it was itself suspended
  /// does not count.
  double lonely_seconds = 10.0;
};

/// Until the launcher ends it, or standard input ends, which the launcher holds open. Returns the exit status.
int run_monitor(const MonitorOptions& options);

}  // namespace tessera
