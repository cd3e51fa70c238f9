// Gives a command its configuration through arguments.
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
  /// Adds the argument CONFIG, --device, and every key as --section.key=value to the command.
  explicit ConfigArguments(CLI::App* command);

  /// Returns the configuration that the arguments give. Throws Error.
  JobConfig read() const;

 private:
  CLI::App* command_;
  std::string file_, device_;
};

}  // namespace tessera
