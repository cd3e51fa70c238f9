#include "ops/gemm/library/library_grouped_gemm.cuh"

namespace tessera::cuda {

std::size_t sm90_library_scratch_bytes(int num_sms) { return library::scratch_bytes<cutlass::arch::Sm90>(num_sms); }

void sm90_library_grouped(const LibraryGrouped& args, cudaStream_t stream) {
  library::multiply<cutlass::arch::Sm90>(args, stream);
}

}  // namespace tessera::cuda
