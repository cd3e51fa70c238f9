// The runs of a comparison, and the training of those that are not there.
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

/// Trains what is not there yet, one run after the other: every side's first seed, then every side's second, ... Checks
/// first all that can be known before: that the runs that are there are whole, that all sides can be compared, that the
/// configurations make a model. Sets `runs` of the configurations. Runs in `options.folder` that are finished are kept,
/// others go on; one whose loss is no longer finite has ended. Returns the signal that stopped it (the run at hand has
/// then saved and ended), or 0. Throws Error; for a run that fails with the end of its log.
int train_missing_runs(std::vector<SideSpec>& specs, const LaunchOptions& options, const volatile StopRequest& stop);

/// Reads a side's runs, or all sides'. Throws Error.
Side read_side(const SideSpec& spec);
std::vector<Side> read_sides(const std::vector<SideSpec>& specs);

}  // namespace tessera
