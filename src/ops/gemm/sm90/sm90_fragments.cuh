// Moves WGMMA's fragments to memory, and loads the scales of 8-bit operands. The kernels of sm90_grouped_gemm_fp8.cuh
// and sm90_grouped_gemm_exact.cuh share this code.
#pragma once

#include <cstddef>
#include <cstdint>

#include "mx/block.h"
#include "ops/kit/ptx.cuh"

namespace tessera::cuda::sm90 {

/// Transposes four words that each of four lanes holds. Word q of lane t becomes word t of lane q.
__device__ inline void transpose_quad(std::uint32_t (&words)[4]) {
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const std::uint32_t other = __shfl_xor_sync(0xffffffff, odd ? words[i] : words[i + 1], 1);
    (odd ? words[i] : words[i + 1]) = other;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const std::uint32_t other = __shfl_xor_sync(0xffffffff, upper ? words[i] : words[i + 2], 2);
    (upper ? words[i] : words[i + 2]) = other;
  }
}

/// Exchanges words between two neighbouring lanes, each of which holds two. Afterwards the even lane has both first
/// words and the odd lane both second words, in the order of the lanes.
template <typename T>
__device__ void exchange_pair(T& first, T& second) {
  const bool odd = threadIdx.x & 1;
  const T other = __shfl_xor_sync(0xffffffff, odd ? first : second, 1);
  (odd ? first : second) = other;
}

/// Holds 16 rows of 128 bytes, which a warp then writes to memory line by line. Rows are swizzled as TMA does it.
struct alignas(128) WarpBuffer {
  static constexpr int kRows = 16, kRowBytes = 128, kChunks = kRowBytes / 16;
  std::byte bytes[kRows * kRowBytes];

  __device__ std::byte* at(int row, int chunk) { return bytes + row * kRowBytes + ((chunk ^ (row & 7)) << 4); }

  /// Calls write(row, chunk, 16 bytes) for every chunk of the buffer, with eight lanes per row. The buffer may be
  /// reused afterwards.
  template <typename Write>
  __device__ void drain(Write&& write) {
    const int lane = threadIdx.x % 32;
    __syncwarp();
#pragma unroll
    for (int first = 0; first < kRows; first += 32 / kChunks) {
      const int row = first + lane / kChunks, chunk = lane % kChunks;
      write(row, chunk, *reinterpret_cast<const uint4*>(at(row, chunk)));
    }
    __syncwarp();
  }
};

/// Writes a warp's part of a warpgroup's sums of 64 rows × 2 · kCount columns as bfloat16. `y` points to the first of
/// the 64 rows. It writes only the first `rows` rows and the first `columns` columns. `columns` is a multiple of 8.
template <int kCount>
__device__ void store_rows(const float (&d)[kCount], __nv_bfloat16* y, std::int64_t stride, int rows, int columns,
                           WarpBuffer& buffer) {
  constexpr int kRoundColumns = WarpBuffer::kRowBytes / 2;
  const int lane = threadIdx.x % 32, first_row = threadIdx.x / 32 % 4 * 16;
  const int matrix = lane / 8, in_matrix = lane % 8;
#pragma unroll
  for (int round = 0; round < 2 * kCount / kRoundColumns; ++round) {
#pragma unroll
    for (int pair = 0; pair < kRoundColumns / 16; ++pair) {  // pairs of blocks of 8 columns
      const int i = round * (kRoundColumns / 2) + 8 * pair;
      ptx::stmatrix_x4(buffer.at(in_matrix + matrix % 2 * 8, 2 * pair + matrix / 2), ptx::pack_bf16(d[i], d[i + 1]),
                       ptx::pack_bf16(d[i + 2], d[i + 3]), ptx::pack_bf16(d[i + 4], d[i + 5]),
                       ptx::pack_bf16(d[i + 6], d[i + 7]));
    }
    buffer.drain([&](int row, int chunk, uint4 bytes) {
      const int column = round * kRoundColumns + chunk * 8;
      if (first_row + row < rows && column < columns) {
        *reinterpret_cast<uint4*>(y + (first_row + row) * stride + column) = bytes;
      }
    });
  }
}

/// Describes a matrix of scales of either type in global memory.
struct Scales {
  const void* data = nullptr;
  std::int64_t stride = 0;  // between rows, in scales
  bool is_float = false;

  /// Returns the stored bits, or 0 if `inside` is false.
  template <bool kFloat>
  __device__ std::uint32_t load(std::int64_t row, int column, bool inside) const {
    if (!inside) return 0;
    const std::int64_t at = row * stride + column;
    return kFloat ? __ldg(static_cast<const std::uint32_t*>(data) + at)
                  : __ldg(static_cast<const std::uint8_t*>(data) + at);
  }
  template <bool kFloat>
  __device__ static float value(std::uint32_t stored) {
    return kFloat ? mx::float_of(stored) : mx::value_of_scale(static_cast<std::uint8_t>(stored));
  }
};

}  // namespace tessera::cuda::sm90
