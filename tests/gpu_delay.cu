#include <cstdint>

#include "device/cuda_check.h"
#include "tests/gpu_delay.h"

namespace tessera {
namespace {

__device__ void wait_for(std::uint64_t nanoseconds) {
  std::uint64_t begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - begin < nanoseconds);
}

__global__ void delay_kernel(std::uint64_t nanoseconds) { wait_for(nanoseconds); }

/// Lets the next kernel begin, waits, and copies.
__global__ void late_copy_kernel(const std::byte* from, std::byte* to, std::size_t num_bytes,
                                 std::uint64_t nanoseconds) {
  cudaTriggerProgrammaticLaunchCompletion();
  wait_for(nanoseconds);
  for (std::size_t i = threadIdx.x; i < num_bytes; i += blockDim.x) to[i] = from[i];
}

void delay(const cuda::Stream& stream, int num_blocks, std::size_t shared_bytes, int microseconds) {
  delay_kernel<<<static_cast<unsigned>(num_blocks), 1, shared_bytes, stream.handle()>>>(
      static_cast<std::uint64_t>(microseconds) * 1000);
  TESSERA_CUDA(cudaGetLastError());
}

}  // namespace

void put_delay(const cuda::Stream& stream, int microseconds) { delay(stream, 1, 0, microseconds); }

void put_late_copy(const cuda::Stream& stream, const void* from, std::size_t num_bytes, int microseconds, void* to) {
  late_copy_kernel<<<1, 256, 0, stream.handle()>>>(static_cast<const std::byte*>(from), static_cast<std::byte*>(to),
                                                   num_bytes, static_cast<std::uint64_t>(microseconds) * 1000);
  TESSERA_CUDA(cudaGetLastError());
}

void hold_sms(const cuda::Stream& stream, int num_sms, int microseconds) {
  constexpr int kSharedBytes = 200 << 10;
  TESSERA_CUDA(cudaFuncSetAttribute(delay_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  delay(stream, num_sms, kSharedBytes, microseconds);
}

}  // namespace tessera
