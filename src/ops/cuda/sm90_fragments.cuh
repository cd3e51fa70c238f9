// Between WGMMA's fragments and memory, and the scales of 8-bit operands: what the kernels of
// sm90_grouped_gemm_fp8.cuh and sm90_grouped_gemm_exact.cuh share.
#pragma once

#include <cstdint>

#include "mx/block.h"
#include "ops/cuda/ptx.cuh"

namespace tessera::cuda::sm90 {

/// Four lanes hold four words each: afterwards word q of lane t is what word t of lane q was.
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

/// Two neighbouring lanes hold two words each: afterwards the even one has both first words, the odd one both second
/// words, in the lanes' order.
template <typename T>
__device__ void exchange_pair(T& first, T& second) {
  const bool odd = threadIdx.x & 1;
  const T other = __shfl_xor_sync(0xffffffff, odd ? first : second, 1);
  (odd ? first : second) = other;
}

/// Writes a warpgroup's sums of 64 rows × 2 · kCount columns as bfloat16, whole sectors of 32 bytes of a row by four
/// lanes. `y` is the first of them; rows from `rows` and columns from `columns` (a multiple of 8) on are left out.
template <int kCount>
__device__ void store_rows(const float (&d)[kCount], __nv_bfloat16* y, std::int64_t stride, int rows, int columns) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
  const int column = lane % 2 * 8 + lane % 4 / 2 * 4;  // after the exchange
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool in_rows = row + 8 * half < rows;
    __nv_bfloat16* to = y + (row + 8 * half) * stride + column;
#pragma unroll
    for (int i = 0; i < kCount / 8; ++i) {
      const float* pair = d + 8 * i + 2 * half;  // and the pair of the next 8 columns
      std::uint32_t first = ptx::pack_bf16(pair[0], pair[1]), second = ptx::pack_bf16(pair[4], pair[5]);
      exchange_pair(first, second);
      if (in_rows && 16 * i + column < columns) *reinterpret_cast<uint2*>(to + 16 * i) = uint2{first, second};
    }
  }
}

/// A matrix of scales in global memory, of either type.
struct Scales {
  const void* data = nullptr;
  std::int64_t stride = 0;  // between rows, in scales
  bool is_float = false;

  /// What is stored; 0 where `inside` is false.
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
