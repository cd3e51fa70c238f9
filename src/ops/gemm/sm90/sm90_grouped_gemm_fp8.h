// Grouped matrix products of block-scaled e4m3 on Hopper. Operands are those of mx/quantized.h, and sums are float32.
// Rows [offsets[e], offsets[e + 1]) belong to expert e. Offsets are read on the device, so launches can be captured
// into a graph. Rows from offsets[E] on may hold anything. They do not affect results and are not written. In blockwise
// products, offsets may be null. Then all rows belong to one expert.
//
//   blockwise  y_RM = x_RN · w_EMN[e]ᵀ. x has a scale per row and 128 numbers along N, and w has one per 128 × 128. It
//              uses the FP8 tensor cores. The sum of every 128 numbers is scaled and added in float32 registers. The
//              tensor cores' own sums have too few bits (arXiv 2412.19437, sec. 3.3.2). With E8M0 scales, 256 may
//              take the place of 128. Half as many sums are then added in registers.
//   wgrad      d_w_EMN[e] (= or +=) d_yᵀ · x over expert e's rows. It reads the columns of both operands (d_y_MR,
//              x_NR). They have a scale per row and 128 numbers along R. Where 128 rows of x_NR share it, the
//              product is faster. Offsets are multiples of 128. For an expert without rows it assigns zeros or adds
//              nothing.
//   exact      y_RM = x_RN · w_EMN[e]ᵀ for MXFP8 with a scale per row and 32 numbers. bfloat16 holds these numbers
//              exactly. w was widened when it was quantized. x is widened in registers before it enters the bfloat16
//              tensor cores.
//
// The input's gradient is the forward's product with d_y and the weight's columns. Results have the same bits in every
// run. M and N are multiples of 16. For wgrad, R is, too. Pointers are multiples of 16 bytes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "mx/block.h"
#include "ops/gemm/sm90/sm90_grouped_gemm.h"

namespace tessera::cuda {

/// Holds the operands of a blockwise forward. Scales are float32 [R, ceil(N / 128)] and [E, ceil(M / 128), ceil(N /
/// 128)], or E8M0 [R, ceil(N / 32)] and [E, M, ceil(N / 32)]. E8M0 scales must be equal within each block of 128 or 128
/// × 128, and within 256 numbers along N if has_widest_blocks is set.
struct Sm90BlockwiseForward {
  const std::uint8_t* x_RN = nullptr;
  const void* x_scales = nullptr;
  const std::uint8_t* w_EMN = nullptr;
  const void* w_scales = nullptr;
  mx::ScaleType scale_type = mx::ScaleType::kFloat32;
  bool has_widest_blocks = false;
  const std::int32_t* offsets_E1 = nullptr;
  __nv_bfloat16* y_RM = nullptr;
  int num_experts = 0, num_rows = 0, m = 0, n = 0;  // num_rows: the number of rows that x and y have room for
  int num_sms = kAllSms;
};

/// Holds the operands of a blockwise wgrad. Scales are float32 [M, ceil(R / 128)] and [N, ceil(R / 128)], or E8M0 [M,
/// ceil(R / 32)] and [N, ceil(R / 32)]. E8M0 scales must be equal within each block of 128. If x_is_square is set, x's
/// must also be equal within each 128 × 128 block.
struct Sm90BlockwiseWgrad {
  const std::uint8_t* d_y_MR = nullptr;
  const void* d_y_scales = nullptr;
  const std::uint8_t* x_NR = nullptr;
  const void* x_scales = nullptr;
  mx::ScaleType scale_type = mx::ScaleType::kFloat32;
  const std::int32_t* offsets_E1 = nullptr;
  float* d_w_EMN = nullptr;
  void* scratch = nullptr;  // sm90_blockwise_scratch_bytes(R, M, N) bytes
  bool accumulate = true, x_is_square = false;
  int num_experts = 0, num_rows = 0, m = 0, n = 0;
  int num_sms = kAllSms;
};

/// Returns the bytes of scratch. It holds the state of sums that are cut into parts, and both operands' scales in the
/// order of use.
constexpr std::size_t sm90_blockwise_scratch_bytes(int num_rows, int m, int n) {
  const auto row = [](int count) { return (count + 255) / 256 * 256; };
  return kSm90PartsBytes + std::size_t{4} * ((num_rows + 127) / 128) * (row(m) + row(n));
}

struct Sm90ExactForward {
  const std::uint8_t* x_RN = nullptr;
  const std::uint8_t* x_scales = nullptr;  // [R, ceil(N / 32)]
  const __nv_bfloat16* w_wide = nullptr;   // [E, M, N rounded up to a multiple of 64], in the order of sm90_widen.cuh
  const std::int32_t* offsets_E1 = nullptr;
  __nv_bfloat16* y_RM = nullptr;
  int num_experts = 0, num_rows = 0, m = 0, n = 0;
  int num_sms = kAllSms;
};

void sm90_blockwise_forward(const Sm90BlockwiseForward& args, cudaStream_t stream);
void sm90_blockwise_wgrad(const Sm90BlockwiseWgrad& args, cudaStream_t stream);
void sm90_exact_forward(const Sm90ExactForward& args, cudaStream_t stream);

}  // namespace tessera::cuda
