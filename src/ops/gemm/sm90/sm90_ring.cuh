// The frame of the kernels of grouped products: which threads a block has, and the ring of buffers between those that
// copy operands and those that multiply.
//
// One block per SM lives as long as the launch, and two blocks form a cluster. In each block the first warpgroup is
// the producer, and the other kConsumers warpgroups are the consumers. An operand that both blocks need is copied once
// for both. So a buffer is empty when the consumers of both blocks have read it.
#pragma once

#include <cstdint>

#include "ops/kit/ptx.cuh"

namespace tessera::cuda::sm90 {

inline constexpr int kCluster = 2;
inline constexpr int kWarpgroup = 128, kConsumers = 2, kConsumerThreads = kConsumers * kWarpgroup;
inline constexpr int kThreads = kWarpgroup + kConsumerThreads;

/// Holds the barriers of kStages buffers, in shared memory. Threads go through the buffers in a cycle.
template <int kStages>
struct Ring {
  ptx::Barrier full[kStages], empty[kStages];

  /// Holds a thread's next buffer, and the parity of the phase of its barriers.
  struct Position {
    int stage = 0;
    std::uint32_t parity = 0;

    __device__ void advance() {
      if (++stage == kStages) {
        stage = 0;
        parity ^= 1;
      }
    }
    __device__ int stage_before() const { return (stage + kStages - 1) % kStages; }
  };
  /// A producer's first waits for empty buffers return at once.
  __device__ static Position begin_producer() { return {.parity = 1}; }
  __device__ static Position begin_consumer() { return {}; }

  /// Makes the barriers. One thread executes it. A buffer is full after `num_producers` arrivals and what they
  /// announce. The partner's copy may come before the arrival that announces it. The phase cannot end before it.
  __device__ void init(int num_producers) {
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(&full[i], num_producers);
      ptx::mbarrier_init(&empty[i], kCluster * kConsumerThreads / 32);
    }
    ptx::fence_mbarrier_init();
  }
  __device__ void wait_empty(Position at) { ptx::mbarrier_wait(&empty[at.stage], at.parity); }
  __device__ void wait_full(Position at) { ptx::mbarrier_wait(&full[at.stage], at.parity); }
  /// Tells the producers of both blocks that a warp has read a buffer. The whole warp executes it.
  __device__ void release(int stage) {
    const int lane = threadIdx.x % 32;
    if (lane < kCluster) ptx::mbarrier_arrive_cluster(&empty[stage], lane);
  }
};

/// Runs a block: load(), then produce() in the first warpgroup and consume() in the others. Their threads have
/// kProducerRegisters and kConsumerRegisters registers each.
template <int kProducerRegisters, int kConsumerRegisters, int kStages, typename Load, typename Produce,
          typename Consume>
__device__ void run_block(Ring<kStages>& ring, int num_producers, Load&& load, Produce&& produce, Consume&& consume) {
  if (threadIdx.x == 0) ring.init(num_producers);
  load();
  ptx::cluster_sync();
  if (ptx::warpgroup_idx() == 0) {
    ptx::set_max_registers_down<kProducerRegisters>();
    produce();
  } else {
    ptx::set_max_registers_up<kConsumerRegisters>();
    consume();
  }
  // __syncthreads brings the lanes of warp 0 together, because whole warps must execute cluster_sync. A block stays
  // while its partner may still copy to it or arrive at its barriers.
  __syncthreads();
  ptx::cluster_sync();
}

}  // namespace tessera::cuda::sm90
