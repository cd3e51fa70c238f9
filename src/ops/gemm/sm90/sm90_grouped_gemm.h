// Grouped matrix products in bfloat16 on Hopper. Rows [offsets[e], offsets[e + 1]) belong to expert e. Offsets are read
// on the device, so launches can be captured into a graph. Rows from offsets[E] on may hold anything. They do not
// affect results and are not written.
//
//   forward  y_RM = x_RN · w_EMN[e]ᵀ
//   dgrad    d_x_RN = d_y_RM · w_EMN[e]
//   wgrad    d_w_EMN[e] (= or +=) d_yᵀ · x over expert e's rows, in float32. For an expert without rows it assigns
//            zeros or adds nothing.
//
// Sums are in float32. Results have the same bits in every run. M and N are multiples of 8, and pointers are multiples
// of 16 bytes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <limits>

namespace tessera::cuda {

/// The largest number of experts in one launch.
inline constexpr int kSm90MaxExperts = 256;

/// This value of num_sms stands for all SMs. A launch occupies at most num_sms SMs, with one block on each, as long as
/// it lasts.
inline constexpr int kAllSms = std::numeric_limits<int>::max();

struct Sm90GroupedForward {
  const __nv_bfloat16* x_RN = nullptr;
  const __nv_bfloat16* w_EMN = nullptr;
  const std::int32_t* offsets_E1 = nullptr;
  __nv_bfloat16* y_RM = nullptr;
  int num_experts = 0, num_rows = 0, m = 0, n = 0;  // num_rows: the number of rows that x and y have room for
  int num_sms = kAllSms;
};

struct Sm90GroupedDgrad {
  const __nv_bfloat16* d_y_RM = nullptr;
  const __nv_bfloat16* w_EMN = nullptr;
  const std::int32_t* offsets_E1 = nullptr;
  __nv_bfloat16* d_x_RN = nullptr;
  int num_experts = 0, num_rows = 0, m = 0, n = 0;
  int num_sms = kAllSms;
};

struct Sm90GroupedWgrad {
  const __nv_bfloat16* d_y_RM = nullptr;
  const __nv_bfloat16* x_RN = nullptr;
  const std::int32_t* offsets_E1 = nullptr;
  float* d_w_EMN = nullptr;
  void* scratch = nullptr;  // kSm90PartsBytes bytes
  bool accumulate = true;
  int num_experts = 0, num_rows = 0, m = 0, n = 0;
  int num_sms = kAllSms;
};

/// The bytes of a weight gradient's scratch, 8 per block. If a sum is cut into parts, they tell which parts have been
/// written (PartTurn, sm90_grouped_schedule.cuh). Each launch sets them to 0.
inline constexpr std::size_t kSm90PartsBytes = 4096;

void sm90_grouped_forward(const Sm90GroupedForward& args, cudaStream_t stream);
void sm90_grouped_dgrad(const Sm90GroupedDgrad& args, cudaStream_t stream);
void sm90_grouped_wgrad(const Sm90GroupedWgrad& args, cudaStream_t stream);

}  // namespace tessera::cuda
