// The checks and the launch of all grouped products on Hopper.
#pragma once

#include <algorithm>

#include "device/cuda_check.h"
#include "ops/gemm/sm90/sm90_grouped_gemm.h"
#include "ops/gemm/sm90/sm90_ring.cuh"

namespace tessera::cuda::sm90 {

/// Checks the sizes of a product, whose m and n must be multiples of `alignment`.
template <typename Args>
void check_sizes(const Args& args, int alignment) {
  TESSERA_CHECK(args.num_experts > 0 && args.num_experts <= kSm90MaxExperts, "{} experts", args.num_experts);
  TESSERA_CHECK(args.num_rows > 0 && args.m > 0 && args.n > 0, "rows {}, m {}, n {}", args.num_rows, args.m, args.n);
  TESSERA_CHECK(args.m % alignment == 0 && args.n % alignment == 0, "m {}, n {}", args.m, args.n);
}

/// Launches at most one block on each of num_sms SMs, and at most as many clusters as the GPU holds at once.
template <auto kKernel, typename Shared, typename... Args>
void launch(int num_sms, cudaStream_t stream, const Args&... args) {
  TESSERA_CHECK(num_sms >= kCluster, "{} SMs", num_sms);
  cudaLaunchConfig_t config{};
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = sizeof(Shared);
  config.stream = stream;
  // The attribute belongs to a GPU, and a process may have several, so every launch sets it. The number of clusters is
  // kept, because all GPUs of a run are of one model.
  TESSERA_CUDA(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared)));
  static const int num_clusters = [&] {
    cudaLaunchConfig_t any = config;
    any.gridDim = dim3(kCluster);
    int clusters = 0;
    TESSERA_CUDA(cudaOccupancyMaxActiveClusters(&clusters, kKernel, &any));
    return clusters;
  }();
  config.gridDim = dim3(static_cast<unsigned>(std::min(num_clusters, num_sms / kCluster) * kCluster));
  TESSERA_CUDA(cudaLaunchKernelEx(&config, kKernel, args...));
}

}  // namespace tessera::cuda::sm90
