// Reads the name of this machine.
#pragma once

#include <unistd.h>

#include <array>
#include <string>

namespace tessera {

/// Returns the name of the machine that this process runs on. It is empty if the system reports none.
inline std::string host_name() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "";
}

}  // namespace tessera
