// The monitor of a node is a small process that outlives every rank. It reports to the launcher what the node's ranks
// do, from their files (comm/observe/rank_file.h). It reports at once when one of them ends. It ends ranks when the
// launcher orders it. It also ends them if it has not heard from the launcher for long. A node that was given up must
// not continue alone.
#pragma once

#include <filesystem>
#include <string>

#include "health/verdict.h"

namespace tessera {

/// Environment variable of the monitor: the name that the node's health daemon uses. Set it where that is neither the
/// launcher's name for the node nor the host name. A Kubernetes pod is such a case.
inline constexpr const char* kHealthNodeVariable = "TESSERA_HEALTH_NODE";

struct MonitorOptions {
  std::string node;      // the launcher's name for the node
  std::string endpoint;  // the launcher's address
  std::string key;       // LauncherChannel::key()
  std::string run_id;
  std::filesystem::path folder;  // job.node_folder of the ranks
  /// The folder of the node's health daemon. Without a daemon nothing is known about the node's health.
  std::filesystem::path health_folder = kHealthFolder;
  /// The monitor ends its ranks if it hears nothing from the launcher for this long. Time in which it was suspended
  /// itself does not count.
  double lonely_seconds = 10.0;
};

/// Runs until the launcher ends it, or until its standard input ends, which the launcher holds open. Returns the exit
/// status.
int run_monitor(const MonitorOptions& options);

}  // namespace tessera
