// Dot products for matrices of a few rows, as in decoding. They take as long as their weights take to be read. So each
// weight is read once, and a warp has many loads on their way.
#pragma once

#include "ops/kit/launch.cuh"

namespace tessera::cuda {

/// The most rows of a matrix for which these are used.
inline constexpr int kFewRows = 8;

/// Returns in all lanes of a warp the dot products of w[c] and x[r], each of `length` numbers. The sums are in float32,
/// in an order that depends on the length only. Rows are 16-byte aligned, and the length is a multiple of kLanes.
template <typename T, int kColumns, int kRows>
__device__ void dots_of_warp(const T* const (&w)[kColumns], const T* const (&x)[kRows], std::int64_t length,
                             float (&sums)[kColumns][kRows]) {
  constexpr int kStep = kWarp * kLanes;                    // numbers of a row that a warp takes at once
  constexpr int kAhead = kColumns > 4 ? 1 : 8 / kColumns;  // steps whose weights are loaded before the first is used
#pragma unroll
  for (auto& of_column : sums) {
#pragma unroll
    for (float& sum : of_column) sum = 0.0f;
  }
  for (std::int64_t first = static_cast<int>(threadIdx.x) % kWarp * kLanes; first < length; first += kAhead * kStep) {
    Lanes<T, kLanes> weights[kAhead][kColumns];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      if (first + a * kStep >= length) continue;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) weights[a][c] = get_lanes<kLanes>(w[c] + first + a * kStep);
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      if (first + a * kStep >= length) continue;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float numbers[kLanes];
        load_lanes(x[r] + first + a * kStep, numbers);
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
#pragma unroll
          for (int i = 0; i < kLanes; ++i) sums[c][r] += to_float(weights[a][c].x[i]) * numbers[i];
        }
      }
    }
  }
#pragma unroll
  for (auto& of_column : sums) {
#pragma unroll
    for (float& sum : of_column) {
#pragma unroll
      for (int distance = kWarp / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(kAllLanes, sum, distance);
    }
  }
}

}  // namespace tessera::cuda
