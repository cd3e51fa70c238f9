// What CUTLASS's kernels for groups have in common: types, the scratch, and the launch. `G` has Groups, which the
// kernel reads of every group and which begin the scratch, and the kernel's Gemm.
#pragma once

#include <cutlass/cutlass.h>
#include <cutlass/gemm/device/gemm_universal_adapter.h>

#include <cutlass/gemm/group_array_problem_shape.hpp>

#include "device/cuda_check.h"

namespace tessera::cuda::cutlass_groups {

using cute::Int;

using Cluster = cute::Shape<Int<1>, Int<1>, Int<1>>;
using Rows = cutlass::layout::RowMajor;
using Columns = cutlass::layout::ColumnMajor;
using Problem = cutlass::gemm::GroupProblemShape<cute::Shape<int, int, int>>;

/// Threads of a block of the kernel that sets up the groups, one per group.
constexpr int kSetUpThreads = 128;
inline unsigned set_up_blocks(int num_groups) {
  return static_cast<unsigned>((num_groups + kSetUpThreads - 1) / kSetUpThreads);
}

/// Returns the size of the scratch's first part, which holds the groups. The rest belongs to CUTLASS.
template <typename G>
constexpr std::size_t groups_bytes() {
  // Tensor maps follow, which need this alignment.
  constexpr std::size_t kTensorMapAlignment = 128;
  return (sizeof(typename G::Groups) + kTensorMapAlignment - 1) / kTensorMapAlignment * kTensorMapAlignment;
}

template <typename G>
std::size_t scratch_bytes(int num_sms) {
  typename G::Gemm::Arguments arguments;
  arguments.hw_info.sm_count = num_sms;
  return groups_bytes<G>() + G::Gemm::get_workspace_size(arguments);
}

/// Writes zeros to the weight gradients of experts without rows, which no group assigns.
inline __global__ void zero_empty_kernel(const std::int32_t* offsets_E1, std::int64_t size, float* d_w_EMN) {
  const std::int64_t e = blockIdx.y;
  if (offsets_E1[e] != offsets_E1[e + 1]) return;
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < size; i += step) {
    d_w_EMN[e * size + i] = 0.0f;
  }
}
inline void zero_empty(const std::int32_t* offsets_E1, int num_experts, std::int64_t size, float* d_w_EMN,
                       cudaStream_t stream) {
  constexpr unsigned kThreads = 128, kBlocksPerExpert = 64;
  zero_empty_kernel<<<dim3(kBlocksPerExpert, static_cast<unsigned>(num_experts)), kThreads, 0, stream>>>(offsets_E1,
                                                                                                         size, d_w_EMN);
}

inline void require_success(cutlass::Status status) {
  TESSERA_CHECK(status == cutlass::Status::kSuccess, "CUTLASS: {}", cutlass::cutlassGetStatusString(status));
}

template <typename G>
void run(const typename G::Gemm::Arguments& arguments, std::byte* scratch, cudaStream_t stream) {
  require_success(G::Gemm::can_implement(arguments));
  typename G::Gemm gemm;
  require_success(gemm.initialize(arguments, scratch + groups_bytes<G>(), stream));
  require_success(gemm.run(stream));
}

}  // namespace tessera::cuda::cutlass_groups
