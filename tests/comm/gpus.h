// Runs bodies of tests on several ranks, each of which is a thread with its own GPU. With NCCL_MULTI_RANK_GPU_ENABLE=1,
// which NCCL 2.30 and newer know, ranks share the machine's GPUs. NCCL_MAX_CTAS=2 then leaves room for all of them.
// Windows and all-to-alls work in this mode, but NCCL's collectives hang (docs/cuda.md).
#pragma once

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "device/cuda.h"
#include "tests/comm/ranks.h"

namespace tessera::comm_test {

inline constexpr int kMaxGpus = 8;

/// Returns how many ranks can have a GPU, up to `at_most`.
inline int num_gpus(int at_most = kMaxGpus) {
  const char* shares = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  const int num_devices = cuda::num_devices();
  if (num_devices > 0 && shares != nullptr && shares == std::string_view("1")) return at_most;
  return std::min(num_devices, at_most);
}
inline int gpu_of(int rank) { return rank % cuda::num_devices(); }

/// Gives the GPUs of one machine a network that kernels can use (gin_plugin.cc). Must be called before CUDA and NCCL
/// start. All ranks wait in kernels in one process. So no kernel may have to be loaded meanwhile, and the plugin's
/// copies may not queue up behind such a kernel.
inline bool use_gin_plugin(const char* path) {
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
  setenv("NCCL_NET_PLUGIN", path, 1);
  setenv("NCCL_NET_PLUGIN_REF_COUNT", "1", 1);  // NCCL 2.28 forgets a plugin that it has unloaded
  setenv("NCCL_GIN_TYPE", "2", 1);              // the host's threads send
  setenv("NCCL_GIN_NCONTEXTS", "1", 1);
  return true;
}

/// Runs `body` on ranks, as with_ranks() does. `world` moves tensors in GPU memory on behalf of the stream that `body`
/// receives.
inline void with_gpus(int num_ranks, const std::function<void(ProcessGroup& world, const cuda::Stream&)>& body,
                      const RankOptions& options = {}) {
  with_ranks(
      num_ranks,
      [&](ProcessGroup& world) {
        cuda::use_device(gpu_of(world.rank()));
        const cuda::Stream computation;
        world.use_gpu(computation, computation);
        body(world, computation);
      },
      options);
}

}  // namespace tessera::comm_test
