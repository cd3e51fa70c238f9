// Trains the missing runs of a comparison and reads all of them.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "compare/side.h"
#include "compare/side_spec.h"
#include "system/child_process.h"

namespace tessera {

struct LaunchOptions {
  std::filesystem::path folder;  // runs go to FOLDER/<label>/seed-<debug.seed>
  std::int64_t num_seeds = 3;    // seeds of a started side: the configuration's + 1, + 2, ... If other sides have runs,
                                 // theirs instead
  std::string program = "/proc/self/exe";
};

/// Trains the missing runs, one after the other: every side's first seed, then every side's second seed, and so on.
/// First it checks all that can be known before: existing runs are intact, all sides can be compared, and the
/// configurations make a model. It sets `runs` of the configurations. Runs in `options.folder` that are finished are
/// kept, and others are continued; a run whose loss is not finite any more has ended. Returns the signal that stopped
/// it, after the current run has saved and ended, or 0. Throws Error; if a run fails, the message has the end of its
/// log.
int train_missing_runs(std::vector<SideSpec>& specs, const LaunchOptions& options, const volatile StopRequest& stop);

/// Read the runs of one side, or of all sides. Throw Error.
Side read_side(const SideSpec& spec);
std::vector<Side> read_sides(const std::vector<SideSpec>& specs);

}  // namespace tessera
