// Dot products for matrices of a few rows, as in decoding. They take as long as their weights take to be read. So each
// weight is read once, and a warp has many loads on their way.
#pragma once

#include "ops/kit/launch.cuh"

namespace tessera::cuda {

/// The most rows of a matrix for which these are used.
inline constexpr int kFewRows = 8;

/// Computes in a warp the dot products of kColumns rows of a weight, each of `length` numbers, with rows of another
/// matrix. Rows are 16-byte aligned, and the length is a multiple of kLanes.
template <typename T, int kColumns>
class DotsOfWarp {
 public:
  /// Starts to load the weights w[c].
  __device__ DotsOfWarp(const T* const (&w)[kColumns], std::int64_t length) : length_(length) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) w_[c] = w[c];
    load(first());
  }

  /// Returns in all lanes the products of w[c] and x[r]. The sums are in float32, in an order that depends on the
  /// length only. Must be called once.
  template <int kRows>
  __device__ void with(const T* const (&x)[kRows], float (&sums)[kColumns][kRows]) {
#pragma unroll
    for (auto& of_column : sums) {
#pragma unroll
      for (float& sum : of_column) sum = 0.0f;
    }
    for (std::int64_t begin = first(); begin < length_;) {
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        if (begin + a * kStep < length_) add(a, x, begin + a * kStep, sums);
      }
      begin += kAhead * kStep;
      load(begin);
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

 private:
  static constexpr int kStep = kWarp * kLanes;  // numbers of a row that a warp takes at once
  static constexpr int kAhead = 8 / kColumns;   // steps whose weights are loaded before the first is used

  __device__ static std::int64_t first() { return static_cast<int>(threadIdx.x) % kWarp * kLanes; }
  __device__ void load(std::int64_t begin) {
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      if (begin + a * kStep >= length_) continue;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) weights_[a][c] = get_lanes<kLanes>(w_[c] + begin + a * kStep);
    }
  }
  /// Adds the products of one step's weights.
  template <int kRows>
  __device__ void add(int a, const T* const (&x)[kRows], std::int64_t begin, float (&sums)[kColumns][kRows]) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float numbers[kLanes];
      load_lanes(x[r] + begin, numbers);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
#pragma unroll
        for (int i = 0; i < kLanes; ++i) sums[c][r] += to_float(weights_[a][c].x[i]) * numbers[i];
      }
    }
  }

  const T* w_[kColumns];
  std::int64_t length_;
  Lanes<T, kLanes> weights_[kAhead][kColumns];
};

}  // namespace tessera::cuda
