// Grouped matrix products of MXFP8 on Blackwell's block-scaled tensor cores (tcgen05.mma). CUTLASS's kernel for groups
// computes them. The code was compiled but has not run so far, because no Blackwell was available.
//
// Elements are e4m3. There is an E8M0 scale per row and 32 numbers along the contraction. Scales have the packed order
// of mx/scale_layout.h, with separate tiles for each group (ops/quantize/pack_scales.h). Sums are float32. Rows
// [offsets[e], offsets[e + 1]) belong to expert e. Offsets are read on the device, so launches can be captured into a
// graph.
//
//   forward  y_RM = x_RN · w_EMN[e]ᵀ. Rows from offsets[E] on do not affect results and are not written.
//   wgrad    d_w_EMN[e] (= or +=) d_yᵀ · x over expert e's rows. It reads the columns of both operands (d_y_MR, x_NR).
//            Offsets and R are multiples of 32. For an expert without rows it assigns zeros or adds nothing.
//
// The input's gradient is the forward's product with d_y and the weight's columns. M and N are multiples of 16.
// Pointers are multiples of 16 bytes, but those of scales and scratch are multiples of 128.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace tessera::cuda {

inline constexpr int kSm100MaxExperts = 512;

/// Return the bytes of scratch for a GPU with this number of SMs.
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
