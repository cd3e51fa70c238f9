#include "base/error.h"
#include "ops/gemm/library/library_grouped_gemm.h"
#include "ops/gemm/sm100/sm100_block_scaled.h"

// A build without Blackwell has these functions in place of CUTLASS's kernels. Such a build refuses Blackwell GPUs
// (device/cuda.cc).
namespace tessera::cuda {
namespace {

[[noreturn]] void fail_without_kernels() { fail("this build has no kernels for Blackwell"); }

}  // namespace

std::size_t sm100_forward_scratch_bytes(int) { fail_without_kernels(); }
std::size_t sm100_wgrad_scratch_bytes(int) { fail_without_kernels(); }
std::size_t sm100_library_scratch_bytes(int) { fail_without_kernels(); }
void sm100_grouped_forward(const Sm100GroupedForward&, cudaStream_t) { fail_without_kernels(); }
void sm100_grouped_wgrad(const Sm100GroupedWgrad&, cudaStream_t) { fail_without_kernels(); }
void sm100_library_grouped(const LibraryGrouped&, cudaStream_t) { fail_without_kernels(); }

}  // namespace tessera::cuda
