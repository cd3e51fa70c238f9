// Grouped matrix products of MXFP8 on Blackwell's block-scaled tensor cores (tcgen05.mma), by CUTLASS's kernel for
// groups. Compiled, but not run so far: no Blackwell was at hand. Elements are e4m3 with an E8M0 scale per row and 32
// along the contraction, in the packed order of mx/scale_layout.h, each group's in tiles of its own
// (ops/quantize/pack_scales.h); sums are float32. Rows [offsets[e], offsets[e + 1]) belong to expert e; offsets are
// read on the device, so launches can be captured into a graph.
//
//   forward  y_RM = x_RN · w_EMN[e]ᵀ. Rows at and beyond offsets[E] are neither read into a result nor written.
//   wgrad    d_w_EMN[e] (= or +=) d_yᵀ · x over expert e's rows, from both operands' columns (d_y_MR, x_NR). Offsets
//            are multiples of 32, as is R. An expert without rows assigns zeros, or adds nothing.
//
// The input's gradient is the forward's product, of d_y and the weight's columns. M and N are multiples of 16; pointers
// are multiples of 16 bytes, scales' and the scratch's of 128.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace tessera::cuda {

inline constexpr int kSm100MaxExperts = 512;

/// Scratch on a GPU of so many SMs.
std::size_t sm100_forward_scratch_bytes(int num_sms);
std::size_t sm100_wgrad_scratch_bytes(int num_sms);

struct Sm100GroupedForward {
  const std::uint8_t* x_RN = nullptr;
  const std::uint8_t* x_scales = nullptr;  // packed, groups of rows
  const std::uint8_t* w_EMN = nullptr;
  const std::uint8_t* w_scales = nullptr;  // packed, groups of M rows
  const std::int32_t* offsets_E1 = nullptr;
  __nv_bfloat16* y_RM = nullptr;
  std::byte* scratch = nullptr;
  int num_experts = 0, m = 0, n = 0, num_sms = 0;
};

struct Sm100GroupedWgrad {
  const std::uint8_t* d_y_MR = nullptr;
  const std::uint8_t* d_y_scales = nullptr;  // packed, groups of columns
  const std::uint8_t* x_NR = nullptr;
  const std::uint8_t* x_scales = nullptr;  // packed, groups of columns
  const std::int32_t* offsets_E1 = nullptr;
  float* d_w_EMN = nullptr;
  std::byte* scratch = nullptr;
  bool accumulate = true;
  int num_experts = 0, num_rows = 0, m = 0, n = 0, num_sms = 0;
};

void sm100_grouped_forward(const Sm100GroupedForward& args, cudaStream_t stream);
void sm100_grouped_wgrad(const Sm100GroupedWgrad& args, cudaStream_t stream);

}  // namespace tessera::cuda
