// Dot products for matrices of a few rows, as in decoding. They take as long as their weights take to be read. So a
// warp reads a weight once for all rows, and has many loads on their way.
#pragma once

#include "ops/kit/reduce.cuh"

namespace tessera::cuda {

/// The most rows of a matrix for which these are used.
inline constexpr int kFewRows = 8;

/// The warps of a block of such kernels, and the blocks that an SM must have room for. With more blocks a thread has
/// fewer registers, and the compiler would load the other matrix piece by piece instead of at once.
inline constexpr int kDotsWarps = 4, kDotsThreads = kDotsWarps * kWarp, kDotsBlocks = 3;

/// Returns the number of blocks whose warps compute a number each.
inline unsigned dots_blocks(std::int64_t numbers) {
  return static_cast<unsigned>((numbers + kDotsWarps - 1) / kDotsWarps);
}

/// Holds kLanes numbers as they lie in memory. An array of bfloat16 would be unpacked as soon as it is loaded.
template <typename T>
struct PackedLanes {
  static constexpr int kWords = kLanes * sizeof(T) / sizeof(uint4);
  uint4 words[kWords];

  /// Loads the numbers, or zeros if they do not exist.
  __device__ void load(const T* from, bool exist) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = exist ? reinterpret_cast<const uint4*>(from)[i] : uint4{};
  }
  __device__ void unpack(float (&x)[kLanes]) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const unsigned word[4] = {words[i].x, words[i].y, words[i].z, words[i].w};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if constexpr (sizeof(T) == sizeof(float)) {
          x[4 * i + k] = __uint_as_float(word[k]);
        } else {  // bfloat16 is a float's upper half
          x[2 * k] = __uint_as_float(word[k] << 16);
          x[2 * k + 1] = __uint_as_float(word[k] & 0xffff0000u);
        }
      }
    }
  }
};

/// Computes in a warp the dot products of kColumns rows of a weight, each of `length` numbers, with rows of another
/// matrix. Rows are 16-byte aligned, and the length is a multiple of kLanes. The weights of kAhead steps are loaded
/// before the first is used.
template <typename T, int kColumns, int kAhead = 16 / sizeof(T) / kColumns>
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
    for (std::int64_t begin = first(); begin < length_; begin += kAhead * kStep) {
      if (begin > first()) load(begin);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        PackedLanes<T> numbers[kAhead];
#pragma unroll
        for (int a = 0; a < kAhead; ++a) numbers[a].load(x[r] + begin + a * kStep, begin + a * kStep < length_);
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
          float of_row[kLanes], of_column[kLanes];
          numbers[a].unpack(of_row);
#pragma unroll
          for (int c = 0; c < kColumns; ++c) {
            weights_[a][c].unpack(of_column);
#pragma unroll
            for (int i = 0; i < kLanes; ++i) sums[c][r] += of_column[i] * of_row[i];
          }
        }
      }
    }
#pragma unroll
    for (auto& of_column : sums) {
#pragma unroll
      for (float& sum : of_column) sum = sum_of_warp(sum);
    }
  }

 private:
  static constexpr int kStep = kWarp * kLanes;  // numbers of a row that a warp takes at once

  __device__ static std::int64_t first() { return static_cast<int>(threadIdx.x) % kWarp * kLanes; }
  __device__ void load(std::int64_t begin) {
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) weights_[a][c].load(w_[c] + begin + a * kStep, begin + a * kStep < length_);
    }
  }

  const T* w_[kColumns];
  std::int64_t length_;
  PackedLanes<T> weights_[kAhead][kColumns];
};

}  // namespace tessera::cuda
