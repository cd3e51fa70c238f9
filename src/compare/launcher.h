// The runs of a comparison: sides as they are written on the command line, and the training of those that are not
// there.
#pragma once

#include <csignal>
#include <filesystem>
#include <string>
#include <vector>

#include "compare/side.h"

namespace tessera {

/// A side: runs that are there, or a configuration of runs to be started.
struct SideSpec {
  std::string label;
  std::string text;                         // as given, without the label
  std::vector<std::filesystem::path> runs;  // folders; of a configuration once train_missing_runs has run
  std::string config;                       // a TOML file
  std::vector<std::string> overrides;       // "--section.key=value"

  bool is_started() const { return !config.empty(); }
};

/// "[LABEL=]FOLDER[,FOLDER...]" or "[LABEL=]CONFIG.toml [--section.key=value ...]". Throws Error.
SideSpec parse_side(const std::string& text);

struct LaunchOptions {
  std::filesystem::path folder;  // runs go to FOLDER/<label>/seed-<debug.seed>
  std::int64_t num_seeds = 3;    // seeds of a started side: the configuration's + 1, + 2, ... If other sides have runs,
                                 // theirs instead
  std::string program = "/proc/self/exe";
};

/// Trains what is not there yet, one run after the other: every side's first seed, then every side's second, ... Checks
/// first that all sides can be compared, and sets `runs` of the configurations. Runs in `options.folder` that are
/// finished are kept, others go on. Returns the signal that stopped it (the run at hand has then saved and ended), or
/// 0. Throws Error; for a run that fails with the end of its log.
int train_missing_runs(std::vector<SideSpec>& specs, const LaunchOptions& options,
                       const volatile std::sig_atomic_t& stop_signal);

/// Reads the runs of all sides. Throws Error.
std::vector<Side> read_sides(const std::vector<SideSpec>& specs);

}  // namespace tessera
