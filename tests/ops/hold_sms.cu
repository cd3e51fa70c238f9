#include <cstdint>

#include "tensor/cuda_check.h"
#include "tests/ops/hold_sms.h"

namespace tessera {
namespace {

__global__ void hold_kernel(std::uint64_t nanoseconds) {
  std::uint64_t begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - begin < nanoseconds);
}

}  // namespace

void hold_sms(const cuda::Stream& stream, int num_sms, int microseconds) {
  constexpr int kSharedBytes = 200 << 10;
  TESSERA_CUDA(cudaFuncSetAttribute(hold_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  hold_kernel<<<static_cast<unsigned>(num_sms), 32, kSharedBytes, stream.handle()>>>(
      static_cast<std::uint64_t>(microseconds) * 1000);
  TESSERA_CUDA(cudaGetLastError());
}

}  // namespace tessera
