// Parses a side of a comparison as it is written on the command line.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace tessera {

/// Describes existing runs, or a configuration of runs that will be started.
struct SideSpec {
  std::string label;
  std::string text;                         // as given, without the label
  std::vector<std::filesystem::path> runs;  // folders; for a configuration, train_missing_runs sets them
  std::string config;                       // a TOML file
  std::vector<std::string> overrides;       // "--section.key=value"

  bool is_started() const { return !config.empty(); }
};

/// Parses "[LABEL=]FOLDER[,FOLDER...]" or "[LABEL=]CONFIG.toml [--section.key=value ...]". Throws Error.
SideSpec parse_side(const std::string& text);

}  // namespace tessera
