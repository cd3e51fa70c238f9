// Reads NCCL's settings of this process.
#pragma once

#include <unistd.h>

#include <map>
#include <string>
#include <string_view>

namespace tessera {

/// Returns the environment variables that NCCL reads (NCCL_*), by name.
inline std::map<std::string, std::string> nccl_settings() {
  std::map<std::string, std::string> settings;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    const std::string_view text = *variable;
    if (!text.starts_with("NCCL_")) continue;
    const std::size_t equals = text.find('=');
    settings.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  return settings;
}

}  // namespace tessera
