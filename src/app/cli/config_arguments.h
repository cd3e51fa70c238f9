// The arguments by which a command gets its configuration.
#pragma once

#include <CLI/CLI.hpp>
#include <memory>
#include <string>

#include "config/job_config.h"

namespace tessera {

/// The option that only commands with a configuration have.
inline constexpr const char* kConfigOption = "--job.config_file";

class ConfigArguments {
 public:
  /// Gives the command the argument CONFIG, --device, and every key as --section.key=value.
  explicit ConfigArguments(CLI::App* command);

  /// Throws Error.
  JobConfig read() const;

 private:
  CLI::App* command_;
  std::string file_, device_;
};

}  // namespace tessera
