// The time of day, for what processes of several machines and people compare.
#pragma once

#include <chrono>

namespace tessera {

/// Seconds since 1970.
inline double unix_time() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace tessera
