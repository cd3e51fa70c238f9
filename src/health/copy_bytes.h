#pragma once

#include <algorithm>

#include "ops/runtime/runtime.h"

namespace tessera {

/// Copies between host memory and that of `runtime`'s GPU, and waits. If `runtime` is null, copies within host memory.
inline void copy_bytes(cuda::Runtime* runtime, const void* from, std::size_t num_bytes, void* to) {
  if (runtime == nullptr) {
    std::copy_n(static_cast<const std::byte*>(from), num_bytes, static_cast<std::byte*>(to));
    return;
  }
  cuda::copy_bytes(runtime->stream(), from, num_bytes, to);
  runtime->synchronize();
}

}  // namespace tessera
