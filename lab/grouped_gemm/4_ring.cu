// Level 4: a ring of buffers between warps that copy and warps that multiply.
//
// The idea. Warps specialize. A producer warpgroup does nothing but start copies. Two consumer warpgroups do nothing
// but multiply. Between them lies a ring of four buffers with two barriers each: `full` (the copies have arrived) and
// `empty` (both consumers have read). The producer runs up to four steps ahead, so a copy has 4000 cycles to arrive
// where it needs 1500. Consumers keep one step's WGMMA in flight while they wait for the next buffer. The producer
// gives its registers to the consumers, which need 128 for sums alone.
//
// What must be spent. The same as at level 3: 1024 cycles of tensor cores a step, 48 KiB a step from the L2 cache.
//
// What limits it. Each tile begins with an empty ring (1500 cycles) and ends with the output, 64 KiB through 16 KiB of
// shared memory (some 3000 cycles), and the tensor cores idle meanwhile: 4500 of 37,300 cycles a tile where N is 2048.
// Padding takes 8 %. Then there is the clock: under such a load it falls from 1.98 to about 1.5 GHz, most likely for
// power, and an H200 has 800 TFLOP/s left.
//
// Predicted: 600 TFLOP/s: 800 · 0.88 · 0.92 = 650, less the blocks' starts and the wait at their ends.
#include "level.cuh"
#include "wgmma_tile.cuh"

namespace lab {
namespace {

constexpr int kStages = 4, kConsumerWarps = 8, kThreads = 128 + 32 * kConsumerWarps;
constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;  // per thread, where each had 168

struct alignas(1024) Shared {
  OperandTiles stages[kStages];
  tessera::cuda::sm90::WarpBuffer out[kConsumerWarps];
  ptx::Barrier full[kStages], empty[kStages];
};

// Step s uses buffer s % kStages. A barrier's phases alternate in parity, and the buffer's use u completes phase u. A
// wait for the parity before the first phase returns at once, so the producer finds the ring empty.
__device__ int stage_of(int step) { return step % kStages; }
__device__ std::uint32_t parity_of(int step) { return step / kStages % 2; }

__device__ void produce(const CUtensorMap& map_x, const CUtensorMap& map_w, Shared& shared, const RowTile& tile,
                        int column, int steps) {
  for (int step = 0; step < steps; ++step) {
    OperandTiles& to = shared.stages[stage_of(step)];
    ptx::Barrier* full = &shared.full[stage_of(step)];
    ptx::mbarrier_wait(&shared.empty[stage_of(step)], parity_of(step) ^ 1);
    ptx::mbarrier_arrive_expect_tx(full, sizeof(OperandTiles));
    ptx::tma_load_2d(to.x, &map_x, full, step * kStepK, tile.row);
    ptx::tma_load_3d(to.w, &map_w, full, step * kStepK, column, tile.expert);
  }
}

__device__ void consume(float (&d)[128], Shared& shared, int warpgroup, int steps) {
  const auto release = [&](int step) {
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&shared.empty[stage_of(step)]);
  };
  for (int step = 0; step < steps; ++step) {
    ptx::mbarrier_wait(&shared.full[stage_of(step)], parity_of(step));
    multiply(d, shared.stages[stage_of(step)], warpgroup, step > 0);
    if (step > 0) {
      ptx::wgmma_wait<1>();  // all but this step's have read their operands
      release(step - 1);
    }
  }
  ptx::wgmma_wait<0>();
  ptx::wgmma_touch(d);
}

__global__ void __launch_bounds__(kThreads, 1)
    ring(const __grid_constant__ CUtensorMap map_x, const __grid_constant__ CUtensorMap map_w, Forward p) {
  if constexpr (ptx::kIsSm90a) {
    extern __shared__ __align__(1024) std::byte memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const RowTile tile = find_row_tile(p.offsets_E1, p.num_experts, blockIdx.y, kTileRows);
    if (tile.expert < 0) return;
    const int column = blockIdx.x * kTileColumns, steps = ceil_div(p.n, kStepK);
    if (threadIdx.x == 0) {
      for (int i = 0; i < kStages; ++i) {
        ptx::mbarrier_init(&shared.full[i], 1);
        ptx::mbarrier_init(&shared.empty[i], kConsumerWarps);
      }
      ptx::fence_mbarrier_init();
    }
    __syncthreads();
    if (ptx::warpgroup_idx() == 0) {
      ptx::set_max_registers_down<kProducerRegisters>();
      if (threadIdx.x == 0) produce(map_x, map_w, shared, tile, column, steps);
    } else {
      ptx::set_max_registers_up<kConsumerRegisters>();
      const int warpgroup = ptx::warpgroup_idx() - 1;
      float d[128];
      consume(d, shared, warpgroup, steps);
      store_tile(d, p, tile, column, warpgroup, shared.out[threadIdx.x / 32 - 4]);
    }
  } else {
    ptx::trap_on_other_architecture("ring");
  }
}

}  // namespace

void forward_4_ring(const Forward& args, cudaStream_t stream) { launch_per_tile<ring, Shared>(kThreads, args, stream); }

}  // namespace lab
