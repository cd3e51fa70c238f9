// Widens MXFP8 to bfloat16, which holds every e4m3 times a power of two. The numbers get the order of k that the tensor
// cores of the exact product read (sm90_grouped_gemm_exact.cuh).
//
// WGMMA reads from each thread the k {2t, 2t + 1, 2t + 8, 2t + 9} of every 16, where t = lane % 4. A sum does not
// depend on the order of k, so the 64 k of a step are renamed. Each thread takes the 16 k from 16t on, and w lies in
// memory in the same order. Then a thread needs one 16-byte load and one scale per row and step.
//
//   place 16j + 2t + {0, 1}      is k = 16t + 4j + {0, 1}
//   place 16j + 2t + 8 + {0, 1}  is k = 16t + 4j + {2, 3}
#pragma once

#include <cstdint>

#include "mx/block.h"
#include "ops/gemm/sm90/sm90_fragments.cuh"
#include "ops/kit/ptx.cuh"

namespace tessera::cuda::sm90 {

/// Widens two e4m3 numbers, bytes kFirst and kFirst + 1 of `bytes`, to bfloat16 and multiplies them by their scale. If
/// their bits are shifted to the place of a bfloat16, they represent the numbers times 2^-120. The NaN of e4m3 becomes
/// 480 here, but then the scale of its block is NaN, too.
template <int kFirst>
__device__ std::uint32_t widen(std::uint32_t bytes, std::uint32_t scale) {
  constexpr std::uint32_t kUp = 0x7b807b80;  // 2^120, twice
  const std::uint32_t high = __byte_perm(bytes, 0, kFirst == 0 ? 0x1404 : 0x3424);
  return ptx::mul_bf16x2(ptx::mul_bf16x2((high >> 4 & 0x07f007f0) | (high & 0x80008000), kUp), scale);
}

/// Returns a scale, which is a power of two, as a pair of equal bfloat16.
__device__ inline std::uint32_t scale_bf16x2(float scale) {
  const std::uint32_t bits = mx::bits_of(scale);
  return bits >> 16 | (bits & 0xffff0000);
}

/// Widens 64 numbers. Four neighbouring lanes execute it. Lane t passes the 16 numbers from 16t on and their scale. It
/// gets the numbers that belong at the places from 16t on.
__device__ inline void widen_in_order(const uint4& bytes, std::uint32_t scale, uint4 (&places)[2]) {
  const std::uint32_t words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
  std::uint32_t low[4], high[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    low[j] = widen<0>(words[j], scale);
    high[j] = widen<2>(words[j], scale);
  }
  transpose_quad(low);
  transpose_quad(high);
  places[0] = uint4{low[0], low[1], low[2], low[3]};
  places[1] = uint4{high[0], high[1], high[2], high[3]};
}

}  // namespace tessera::cuda::sm90
