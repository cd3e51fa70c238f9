// Grouped matrix products in bfloat16 on Hopper. Rows [offsets[e], offsets[e + 1]) belong to expert e; offsets are read
// on the device, so launches can be captured into a graph. Rows at and beyond offsets[E] may hold anything: they are
// neither read into a result nor written.
//
//   forward  y_RM = x_RN · w_EMN[e]ᵀ
//   dgrad    d_x_RN = d_y_RM · w_EMN[e]
//   wgrad    d_w_EMN[e] (= or +=) d_yᵀ · x over expert e's rows, in float32; without rows zeros (or nothing is added)
//
// Sums in float32. Results are the same bits from run to run. M and N are multiples of 8, pointers of 16
// bytes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <limits>

namespace tessera::cuda {

/// The largest number of experts in one launch.
inline constexpr int kSm90MaxExperts = 256;

/// A launch has a block on each of at most num_sms SMs, as long as it lasts; this is all that there are.
inline constexpr int kAllSms = std::numeric_limits<int>::max();

struct Sm90GroupedForward {
  const __nv_bfloat16* x_RN = nullptr;
  const __nv_bfloat16* w_EMN = nullptr;
  const std::int32_t* offsets_E1 = nullptr;
  __nv_bfloat16* y_RM = nullptr;
  int num_experts = 0, num_rows = 0, m = 0, n = 0;  // num_rows: what x and y have room for
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
  void* scratch = nullptr;  // kSm90WgradScratchBytes
  bool accumulate = true;
  int num_experts = 0, num_rows = 0, m = 0, n = 0;
  int num_sms = kAllSms;
};

/// 8 bytes for each block; each launch sets them to 0.
inline constexpr std::size_t kSm90WgradScratchBytes = 4096;

void sm90_grouped_forward(const Sm90GroupedForward& args, cudaStream_t stream);
void sm90_grouped_dgrad(const Sm90GroupedDgrad& args, cudaStream_t stream);
void sm90_grouped_wgrad(const Sm90GroupedWgrad& args, cudaStream_t stream);

}  // namespace tessera::cuda
