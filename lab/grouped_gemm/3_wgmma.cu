// Level 3: tensor cores (WGMMA), with operands that TMA copies.
//
// The idea. One WGMMA instruction of a warpgroup (4 warps) multiplies 64 × 16 by 16 × 256 numbers. It reads both
// operands from shared memory and keeps the sums in registers. One thread starts the copies, and TMA does the rest:
// addresses, the swizzle that WGMMA expects, and zeros outside of the matrix. A block computes 128 rows × 256 columns
// with two warpgroups, in steps of 64 along K, with one buffer.
//
// What must be spent. Tensor cores: 2048 products per SM and cycle, so 1024 cycles a step. 1408 columns fill 5.5 tiles
// of 256, so 9 % of the work is padding: at least 0.63 ms. Copies: 48 KiB a step, 7.2 GB in all, mostly from the L2
// cache, whose rate the lab has seen at 6 TB/s and more.
//
// What limits it. Nothing overlaps. The copy of a step begins when its products before have ended. An SM takes 64 bytes
// per cycle at most, so 48 KiB take 768 cycles after some 700 of latency. The tensor cores then idle for about 1500 of
// 2500 cycles.
//
// Predicted: 360 TFLOP/s: 989 · 1024 / 2500, less the padding.
#include "level.cuh"
#include "wgmma_tile.cuh"

namespace lab {
namespace {

constexpr int kThreads = 2 * 128;

struct alignas(1024) Shared {
  OperandTiles tiles;
  tessera::cuda::sm90::WarpBuffer out[kThreads / 32];
  ptx::Barrier full;
};

__global__ void __launch_bounds__(kThreads, 1)
    one_buffer(const __grid_constant__ CUtensorMap map_x, const __grid_constant__ CUtensorMap map_w, Forward p) {
  if constexpr (ptx::kIsSm90a) {
    extern __shared__ __align__(1024) std::byte memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const RowTile tile = find_row_tile(p.offsets_E1, p.num_experts, blockIdx.y, kTileRows);
    if (tile.expert < 0) return;
    const int column = blockIdx.x * kTileColumns, warpgroup = ptx::warpgroup_idx();
    if (threadIdx.x == 0) {
      ptx::mbarrier_init(&shared.full, 1);
      ptx::fence_mbarrier_init();
    }
    __syncthreads();
    float d[128];
    const int steps = ceil_div(p.n, kStepK);
    for (int step = 0; step < steps; ++step) {
      if (threadIdx.x == 0) {
        ptx::mbarrier_arrive_expect_tx(&shared.full, sizeof(OperandTiles));
        ptx::tma_load_2d(shared.tiles.x, &map_x, &shared.full, step * kStepK, tile.row);
        ptx::tma_load_3d(shared.tiles.w, &map_w, &shared.full, step * kStepK, column, tile.expert);
      }
      __syncwarp();
      ptx::mbarrier_wait(&shared.full, step % 2);  // each step completes one phase of the barrier
      multiply(d, shared.tiles, warpgroup, step > 0);
      ptx::wgmma_wait<0>();
      ptx::wgmma_touch(d);
      __syncthreads();  // both warpgroups have read the buffer
    }
    store_tile(d, p, tile, column, warpgroup, shared.out[threadIdx.x / 32]);
  } else {
    ptx::trap_on_other_architecture("one_buffer");
  }
}

}  // namespace

void forward_3_wgmma(const Forward& args, cudaStream_t stream) {
  launch_per_tile<one_buffer, Shared>(kThreads, args, stream);
}

}  // namespace lab
