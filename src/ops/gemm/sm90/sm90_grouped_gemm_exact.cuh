// The kernel of exact MXFP8 products. It computes y_RM = x_RN · w_EMN[e]ᵀ in tiles of 128 × 256 on the bfloat16 tensor
// cores. bfloat16 holds every e4m3 times a power of two exactly. w was widened when it was quantized. x stays 8-bit
// until it reaches the warpgroup that multiplies it. That warpgroup widens it in registers while the tensor cores work
// for the other warpgroup. Both operands have the order of k of sm90_widen.cuh.
//
// One block per SM lives as long as the launch. The roles of its warps are those of sm90_grouped_gemm_fp8.cuh. Two
// blocks form a cluster. If both have the same columns, each loads half of w for both.
#pragma once

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

#include "ops/gemm/sm90/sm90_fragments.cuh"
#include "ops/gemm/sm90/sm90_grouped_schedule.cuh"
#include "ops/gemm/sm90/sm90_ring.cuh"
#include "ops/gemm/sm90/sm90_widen.cuh"
#include "ops/kit/ptx.cuh"

namespace tessera::cuda::sm90::exact {

inline constexpr int kStages = 5;
inline constexpr int kScaleWarps = 2;
// The scales of this many steps are loaded at once.
inline constexpr int kScaleSteps = 4;
inline constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;

inline constexpr int kStep = 64;  // k per step, which is two blocks
inline constexpr int kBlocks = kStep / mx::kBlock;
inline constexpr int kBox = 128, kBoxBytes = kBox * kStep * 2;  // columns of one copy of w
inline constexpr int kRows = kTileA / kConsumers;               // rows of a warpgroup

struct alignas(1024) Shared {
  struct Stage {
    std::byte w[2 * kBoxBytes];
    std::byte x[kTileA * kStep];
  };
  Stage stages[kStages];
  WarpBuffer buffers[kConsumers * kWarpgroup / 32];
  // Each entry is one bfloat16, twice.
  std::uint32_t scales[kStages][kTileA][kBlocks];
  Ring<kStages> ring;
  Groups groups;
};

struct Params {
  const std::int32_t* offsets_E1 = nullptr;
  int num_experts = 0, num_rows = 0;
  int m = 0, n = 0;
  Scales x_scales;
  __nv_bfloat16* y_RM = nullptr;
};

__device__ inline auto schedule(const Params& p, const Groups& groups) {
  return RowSchedule<false, kStep>(groups, p.num_experts, p.m, p.n);
}

/// Returns how many boxes of w contain columns.
__device__ inline int num_boxes(const Work& work, const Params& p) { return p.m - work.b > kBox ? 2 : 1; }

__device__ inline void copy_operands(const CUtensorMap& map_x, const CUtensorMap& map_w, const Params& p,
                                     Shared& shared) {
  ptx::prefetch_tensor_map(&map_x);
  ptx::prefetch_tensor_map(&map_w);
  constexpr std::uint16_t kBoth = 0b11;
  const int rank = ptx::cluster_cta_rank();
  auto work_list = schedule(p, shared.groups);
  Work work;
  auto at = shared.ring.begin_producer();
  while (work_list.next(work)) {
    const int boxes = num_boxes(work, p);
    for (int step = 0; step < work.k_count; ++step, at.advance()) {
      Shared::Stage& stage = shared.stages[at.stage];
      ptx::Barrier* full = &shared.ring.full[at.stage];
      shared.ring.wait_empty(at);
      ptx::mbarrier_arrive_expect_tx(full, boxes * kBoxBytes + sizeof(stage.x));
      ptx::tma_load_2d(stage.x, &map_x, full, step * kStep, work.a);
      for (int box = 0; box < boxes; ++box) {
        std::byte* to = stage.w + box * kBoxBytes;
        if (!work.b_is_shared) {
          ptx::tma_load_3d(to, &map_w, full, step * kStep, work.b + box * kBox, work.expert);
        } else if (box == rank) {
          ptx::tma_load_3d_multicast(to, &map_w, full, kBoth, step * kStep, work.b + box * kBox, work.expert);
        }
      }
    }
  }
}

/// Copies the scales of 64 rows of x. Each of kScaleWarps warps executes it.
__device__ inline void copy_scales(const Params& p, Shared& shared, int warp) {
  constexpr int kPerLane = kTileA / kScaleWarps / 32;
  const int in_tile = warp * (kTileA / kScaleWarps) + threadIdx.x % 32, num_blocks = ceil_div(p.n, mx::kBlock);
  auto work_list = schedule(p, shared.groups);
  Work work;
  auto at = shared.ring.begin_producer();
  while (work_list.next(work)) {
    for (int begin = 0; begin < work.k_count; begin += kScaleSteps) {
      std::uint32_t stored[kPerLane][kScaleSteps][kBlocks];
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
#pragma unroll
        for (int block = 0; block < kScaleSteps * kBlocks; ++block) {
          const int row = work.a + in_tile + 32 * i, column = begin * kBlocks + block;
          stored[i][block / kBlocks][block % kBlocks] =
              p.x_scales.load<false>(row, column, row < p.num_rows && column < num_blocks);
        }
      }
#pragma unroll
      for (int step = 0; step < kScaleSteps; ++step) {
        if (begin + step >= work.k_count) break;
        shared.ring.wait_empty(at);
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
#pragma unroll
          for (int block = 0; block < kBlocks; ++block) {
            shared.scales[at.stage][in_tile + 32 * i][block] =
                scale_bf16x2(mx::value_of_scale(static_cast<std::uint8_t>(stored[i][step][block])));
          }
        }
        ptx::mbarrier_arrive(&shared.ring.full[at.stage]);
        at.advance();
      }
    }
  }
}

/// Does the work of one of the two consumer warpgroups.
struct Consumer {
  const Params& p;
  Shared& shared;
  const int warpgroup = ptx::warpgroup_idx() - 1, lane = threadIdx.x % 32;
  // This is the thread's first row of the tile.
  const int row = warpgroup * kRows + threadIdx.x / 32 % 4 * 16 + lane / 4;
  Ring<kStages>::Position at = shared.ring.begin_consumer();

  /// Holds the operand fragments of a step, one set per 16 places of k.
  using Fragments = std::uint32_t[kStep / 16][4];

  __device__ void widen_x(Fragments& a) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int in_tile = row + 8 * half, t = lane % 4;
      const uint4 bytes = *reinterpret_cast<const uint4*>(shared.stages[at.stage].x + in_tile * kStep + 16 * t);
      const std::uint32_t scale = shared.scales[at.stage][in_tile][t / 2];
      const std::uint32_t words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
#pragma unroll
      for (int j = 0; j < kStep / 16; ++j) {
        a[j][half] = widen<0>(words[j], scale);
        a[j][half + 2] = widen<2>(words[j], scale);
      }
    }
  }

  template <int kColumns>
  __device__ void multiply(float (&d)[kColumns / 2], const Fragments& a) const {
    const std::uint64_t w = ptx::wgmma_descriptor<ptx::Major::kK>(shared.stages[at.stage].w);
    ptx::wgmma_fence();
#pragma unroll
    for (int j = 0; j < kStep / 16; ++j) {
      ptx::Wgmma<kColumns>::template bf16_from_registers<ptx::Major::kK>(d, a[j], ptx::advance_descriptor(w, 32 * j),
                                                                         true);
    }
    ptx::wgmma_commit();
  }

  template <int kColumns>
  __device__ void tile(const Work& work) {
    float d[kColumns / 2];
#pragma unroll
    for (float& sum : d) sum = 0;  // Otherwise the compiler keeps registers for d between tiles.
    for (int k = 0; k < work.k_count; ++k, at.advance()) {
      Fragments a;
      shared.ring.wait_full(at);
      widen_x(a);
      multiply<kColumns>(d, a);
      ptx::wgmma_wait<0>();
      // All lanes have read x and the scales, because WGMMA has consumed them. So this compiles to nothing.
      __syncwarp();
      shared.ring.release(at.stage);
    }
    ptx::wgmma_touch(d);
    const std::int64_t first = work.a + warpgroup * kRows;
    const int rows = work.row_end - static_cast<int>(first);
    if (work.store && rows > 0)
      store_rows(d, p.y_RM + first * p.m + work.b, p.m, rows, p.m - work.b,
                 shared.buffers[threadIdx.x / 32 - kWarpgroup / 32]);
  }

  __device__ void run() {
    auto work_list = schedule(p, shared.groups);
    Work work;
    while (work_list.next(work)) {
      if (num_boxes(work, p) == 2) {
        tile<kTileB>(work);
      } else {
        tile<kBox>(work);
      }
    }
  }
};

__device__ inline void run(const CUtensorMap& map_x, const CUtensorMap& map_w, const Params& p, Shared& shared) {
  const auto load = [&] { RowSchedule<false, kStep>::load(shared.groups, p.offsets_E1, p.num_experts, p.m); };
  const auto produce = [&] {
    const int warp = threadIdx.x / 32;
    if (threadIdx.x == 0) {
      copy_operands(map_x, map_w, p, shared);
    } else if (warp >= 1 && warp <= kScaleWarps) {
      copy_scales(p, shared, warp - 1);
    }
  };
  run_block<kProducerRegisters, kConsumerRegisters>(shared.ring, 1 + 32 * kScaleWarps, load, produce, [&] {
    Consumer{p, shared}.run();
  });
}

__global__ void __launch_bounds__(kThreads, 1) __cluster_dims__(kCluster, 1, 1)
    exact_gemm(const __grid_constant__ CUtensorMap map_x, const __grid_constant__ CUtensorMap map_w,
               const __grid_constant__ Params params) {
  if constexpr (ptx::kIsSm90a) {
    extern __shared__ __align__(1024) std::byte shared[];
    run(map_x, map_w, params, *reinterpret_cast<Shared*>(shared));
  } else {
    ptx::trap_on_other_architecture("exact_gemm");
  }
}

}  // namespace tessera::cuda::sm90::exact
