// Trains the missing runs of a comparison and reads all of them.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "compare/side.h"
#include "compare/side_spec.h"
#include "system/child_process.h"

namespace tessera {

inline constexpr std::int64_t kMaxSeeds = 1000;  // of a side

struct LaunchOptions {
  std::filesystem::path folder;  // runs go to FOLDER/<label>/seed-<debug.seed>
  std::int64_t num_seeds = 3;    // seeds of a started side: the configuration's + 1, + 2, ... If other sides have runs,
                                 // theirs instead
  std::string program = "/proc/self/exe";
};

/// Trains the missing runs, one after the other: every side's first seed, then every side's second seed, and so on.
/// First it checks all that can be known before. Existing runs must be intact, all sides must be comparable, and the
/// configurations must make a model. It sets `runs` of the configurations. It keeps finished runs in `options.folder`,
/// and continues others. A run whose loss is not finite any more has ended. Returns the signal that stopped it, after
/// the current run has saved and ended, or 0. Throws Error. If a run fails, the message has the end of its log.
int train_missing_runs(std::vector<SideSpec>& specs, const LaunchOptions& options, const volatile StopRequest& stop);

/// Reads the runs of one side. Throws Error.
Side read_side(const SideSpec& spec);
/// Reads the runs of all sides. Throws Error.
std::vector<Side> read_sides(const std::vector<SideSpec>& specs);

}  // namespace tessera
