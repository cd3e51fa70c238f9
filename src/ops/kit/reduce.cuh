// Sums whose order depends on the problem only, so results are reproducible.
#pragma once

#include "ops/kit/launch.cuh"

namespace tessera::cuda {

inline constexpr int kMaxThreads = 1024;

/// Returns the sum over a warp's lanes in all of them.
template <typename Number>
__device__ Number sum_of_warp(Number x) {
#pragma unroll
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) x += __shfl_xor_sync(kAllLanes, x, lanes);
  return x;
}

/// Returns the largest of a warp's lanes in all of them. It ignores NaN.
__device__ inline float max_of_warp(float x) {
#pragma unroll
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, lanes));
  return x;
}

/// Returns the sum over a block's threads (whole warps) in all of them. `slots` has one number per warp in shared
/// memory. It must not be used again before the next barrier.
template <typename Number>
__device__ Number sum_of_block(Number sum, Number* slots) {
  sum = sum_of_warp(sum);
  if (blockDim.x <= kWarp) return sum;
  if (threadIdx.x % kWarp == 0) slots[threadIdx.x / kWarp] = sum;
  __syncthreads();
  sum = 0;
  for (unsigned i = 0; i < blockDim.x / kWarp; ++i) sum += slots[i];
  return sum;
}

}  // namespace tessera::cuda
