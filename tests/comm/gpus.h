// Bodies of tests that run on several ranks, each a thread with a GPU of its own.
#pragma once

#include <algorithm>

#include "tensor/cuda.h"
#include "tests/comm/ranks.h"

namespace tessera::comm_test {

inline constexpr int kMaxGpus = 8;

/// Of the ranks that a test wants at most: as many as there are GPUs.
inline int num_gpus(int at_most = kMaxGpus) { return std::min(cuda::num_devices(), at_most); }

/// As with_ranks(); `world` moves GPUs' tensors, on behalf of `computation`.
inline void with_gpus(int num_ranks, const std::function<void(ProcessGroup& world, const cuda::Stream&)>& body,
                      const RankOptions& options = {}) {
  with_ranks(
      num_ranks,
      [&](ProcessGroup& world) {
        cuda::use_device(world.rank());
        const cuda::Stream computation;
        world.use_gpu(computation);
        body(world, computation);
      },
      options);
}

}  // namespace tessera::comm_test
