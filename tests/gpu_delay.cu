#include <cstdint>

#include "device/cuda_check.h"
#include "tests/gpu_delay.h"

namespace tessera {
namespace {

__global__ void delay_kernel(std::uint64_t nanoseconds) {
  std::uint64_t begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - begin < nanoseconds);
}

void delay(const cuda::Stream& stream, int num_blocks, std::size_t shared_bytes, int microseconds) {
  delay_kernel<<<static_cast<unsigned>(num_blocks), 1, shared_bytes, stream.handle()>>>(
      static_cast<std::uint64_t>(microseconds) * 1000);
  TESSERA_CUDA(cudaGetLastError());
}

}  // namespace

void put_delay(const cuda::Stream& stream, int microseconds) { delay(stream, 1, 0, microseconds); }

void hold_sms(const cuda::Stream& stream, int num_sms, int microseconds) {
  constexpr int kSharedBytes = 200 << 10;
  TESSERA_CUDA(cudaFuncSetAttribute(delay_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  delay(stream, num_sms, kSharedBytes, microseconds);
}

}  // namespace tessera
