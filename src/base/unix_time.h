// The time of day, which people and the processes of several machines compare.
#pragma once

#include <chrono>

namespace tessera {

/// Returns the seconds since 1970.
inline double unix_time() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace tessera
