// Grouped matrix products in bfloat16 by CUTLASS's kernel for groups, for up to kLibraryMaxExperts experts. Blackwell
// always uses this kernel. Hopper uses it for more experts than its own kernels take
// (ops/gemm/sm90/sm90_grouped_gemm.h). On Blackwell it has not run so far, because no such GPU was available.
//
// Sums are float32. Rows [offsets[e], offsets[e + 1]) belong to expert e. Offsets are read on the device, so launches
// can be captured into a graph.
//
//   forward  c_RM = a_RN · b_EMN[e]ᵀ, with a = x and b = w. Rows from offsets[E] on are neither read nor written.
//   dgrad    c_RN = a_RM · b_EMN[e], with a = d_y and b = w. The same holds for rows from offsets[E] on.
//   wgrad    c_EMN[e] (= or +=) a_RMᵀ · b_RN over expert e's rows, with a = d_y and b = x, in float32. For an expert
//            without rows it assigns zeros or adds nothing.
//
// M and N are multiples of 8. Pointers are multiples of 16 bytes, but scratch is a multiple of 128.
//
// Why not cuBLAS: cublasGemmGroupedBatchedEx takes the groups' sizes from the host, and the headers of cuBLASLt 13.1,
// CUDA 13.0's, have no grouped products. Later ones take sizes from the device: on Blackwell from CUDA 13.2, on Hopper
// from 13.3 (github.com/pytorch/pytorch/pull/177037, which found CUTLASS's kernel faster for groups of one size).
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace tessera::cuda {

inline constexpr int kLibraryMaxExperts = 512;

enum class LibraryProduct { kForward, kDgrad, kWgrad };

struct LibraryGrouped {
  LibraryProduct product = LibraryProduct::kForward;
  const __nv_bfloat16* a = nullptr;
  const __nv_bfloat16* b = nullptr;
  const std::int32_t* offsets_E1 = nullptr;
  void* c = nullptr;
  std::byte* scratch = nullptr;
  bool accumulate = false;  // for kWgrad only
  int num_experts = 0, m = 0, n = 0, num_sms = 0;
};

/// Return the bytes of scratch that any of the products needs on a GPU with this number of SMs.
std::size_t sm90_library_scratch_bytes(int num_sms);
std::size_t sm100_library_scratch_bytes(int num_sms);

void sm90_library_grouped(const LibraryGrouped& args, cudaStream_t stream);
void sm100_library_grouped(const LibraryGrouped& args, cudaStream_t stream);

}  // namespace tessera::cuda
