// A side of a comparison as it is written on the command line.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace tessera {

/// Runs that are there, or a configuration of runs to be started.
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

}  // namespace tessera
