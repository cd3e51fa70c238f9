// Grouped matrix products of block-scaled e4m3 on Hopper: operands as mx/quantized.h has them, sums in float32. Rows
// [offsets[e], offsets[e + 1]) belong to expert e; offsets are read on the device, so launches can be captured into a
// graph. Rows at and beyond offsets[E] may hold anything: they are neither read into a result nor written.
//
//   blockwise  y_RM = x_RN · w_EMN[e]ᵀ: x with a scale per row and 128 along N, w with one per 128 × 128. FP8 tensor
//              cores; the sum of every 128 numbers is scaled and added up in float32 registers, for the tensor cores'
//              own sums are short of bits (arXiv 2412.19437, sec. 3.3.2).
//   wgrad      d_w_EMN[e] (= or +=) d_yᵀ · x over expert e's rows, from both operands' columns (d_y_MR, x_NR, with a
//              scale per row and 128 along R). Offsets are multiples of 128. An expert without rows assigns zeros, or
//              adds nothing.
//   exact      y_RM = x_RN · w_EMN[e]ᵀ of MXFP8 with scales per row and 32, which bfloat16 holds exactly: w was widened
//              when it was quantized; x is in registers, on its way to the bfloat16 tensor cores.
//
// The input's gradient is the same product, of d_y and the weight's columns. Results are the same bits from run to run.
// M and N are multiples of 16, as is R for wgrad; pointers are multiples of 16 bytes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "mx/block.h"
#include "ops/gemm/sm90/sm90_grouped_gemm.h"

namespace tessera::cuda {

/// Scales are float32 [R, ceil(N / 128)] and [E, ceil(M / 128), ceil(N / 128)], or E8M0 [R, ceil(N / 32)] and [E, M,
/// ceil(N / 32)] that repeat every 128.
struct Sm90BlockwiseForward {
  const std::uint8_t* x_RN = nullptr;
  const void* x_scales = nullptr;
  const std::uint8_t* w_EMN = nullptr;
  const void* w_scales = nullptr;
  mx::ScaleType scale_type = mx::ScaleType::kFloat32;
  const std::int32_t* offsets_E1 = nullptr;
  __nv_bfloat16* y_RM = nullptr;
  int num_experts = 0, num_rows = 0, m = 0, n = 0;  // num_rows: what x and y have room for
  int num_sms = kAllSms;
};

/// Scales are float32 [M, ceil(R / 128)] and [N, ceil(R / 128)], or E8M0 [M, ceil(R / 32)] and [N, ceil(R / 32)] that
/// repeat every 128.
struct Sm90BlockwiseWgrad {
  const std::uint8_t* d_y_MR = nullptr;
  const void* d_y_scales = nullptr;
  const std::uint8_t* x_NR = nullptr;
  const void* x_scales = nullptr;
  mx::ScaleType scale_type = mx::ScaleType::kFloat32;
  const std::int32_t* offsets_E1 = nullptr;
  float* d_w_EMN = nullptr;
  void* scratch = nullptr;  // sm90_blockwise_scratch_bytes
  bool accumulate = true;
  int num_experts = 0, num_rows = 0, m = 0, n = 0;
  int num_sms = kAllSms;
};

inline constexpr std::size_t kSm90PartsBytes = 4096;
/// For the state of sums that are cut in parts, and both operands' scales in the order of use.
constexpr std::size_t sm90_blockwise_scratch_bytes(int num_rows, int m, int n) {
  const auto row = [](int count) { return (count + 255) / 256 * 256; };
  return kSm90PartsBytes + std::size_t{4} * ((num_rows + 127) / 128) * (row(m) + row(n));
}

struct Sm90ExactForward {
  const std::uint8_t* x_RN = nullptr;
  const std::uint8_t* x_scales = nullptr;  // [R, ceil(N / 32)]
  const __nv_bfloat16* w_wide = nullptr;   // [E, M, N up to a multiple of 64], in the order of sm90_widen.cuh
  const std::int32_t* offsets_E1 = nullptr;
  __nv_bfloat16* y_RM = nullptr;
  int num_experts = 0, num_rows = 0, m = 0, n = 0;
  int num_sms = kAllSms;
};

void sm90_blockwise_forward(const Sm90BlockwiseForward& args, cudaStream_t stream);
void sm90_blockwise_wgrad(const Sm90BlockwiseWgrad& args, cudaStream_t stream);
void sm90_exact_forward(const Sm90ExactForward& args, cudaStream_t stream);

}  // namespace tessera::cuda
