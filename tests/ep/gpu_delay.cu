#include <cstdint>

#include "tensor/cuda_check.h"
#include "tests/ep/gpu_delay.h"

namespace tessera::ep_test {
namespace {

__global__ void delay_kernel(std::uint64_t nanoseconds) {
  std::uint64_t begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - begin < nanoseconds);
}

}  // namespace

void put_delay(const cuda::Stream& stream, int microseconds) {
  delay_kernel<<<1, 1, 0, stream.handle()>>>(static_cast<std::uint64_t>(microseconds) * 1000);
  TESSERA_CUDA(cudaGetLastError());
}

}  // namespace tessera::ep_test
