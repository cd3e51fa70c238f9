// Flags in windows, with which level 4 replaces the ends of kernels.
#pragma once

#include <cstdint>

#include "level.cuh"
#include "ops/kit/ptx.cuh"

namespace lab {

namespace ptx = tessera::ptx;

inline constexpr std::uint64_t kTimeoutNs = 2'000'000'000;

/// Waits until the flags of all sources have reached `value`. A warp executes it. A wait that is too long ends the
/// kernel with an error.
__device__ inline void await(const std::uint64_t* flag_P, int num_ranks, std::uint64_t value) {
  const std::uint64_t begin = ptx::nanoseconds();
  if (lane_idx() < num_ranks) {
    while (ptx::load_acquire_sys(flag_P + lane_idx()) < value) {
      if (ptx::nanoseconds() - begin > kTimeoutNs) __trap();
    }
  }
  __syncwarp();  // what one lane has acquired, all may read
}

/// Counts a warp as one that has stored. The last of `expected` returns true, in all lanes, and may then store a flag
/// for all. The whole warp executes it.
__device__ inline bool is_last_to_arrive(unsigned* arrivals, unsigned expected) {
  bool is_last = false;
  __syncwarp();
  if (lane_idx() == 0) {
    __threadfence();  // for the last warp to arrive, on this GPU
    is_last = atomicAdd(arrivals, 1u) == expected - 1;
    if (is_last) {
      *arrivals = 0;
      __threadfence_system();  // for all GPUs
    }
  }
  __syncwarp();
  return __any_sync(kAllLanes, is_last);
}

}  // namespace lab
