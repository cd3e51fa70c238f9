// The kernel of the blockwise products: D[i, j] = Σ_k A[i, k] · B[j, k], 256 × 128 at a time, with sums S over 128 k by
// FP8 tensor cores and D = Σ_s a[i, s] · b[j, s] · S_s[i, j] in float32 registers. Both operands have k in the
// contiguous dim, as FP8 WGMMA reads nothing else.
//
//            D       i      j         k      A              B
//   forward  y       rows   columns   N      x   [R, N]     w   [E, M, N], one b for all j
//   wgrad    d_w[e]  M      N         rows   d_yᵀ [M, R]    xᵀ  [N, R]
//
// One block per SM lives as long as the launch. Warp 0 copies operands (TMA) into kStages buffers, the next ones
// their scales.// Two warpgroups multiply, 128 × 128 each as two products of 64 × 128 one after the other: while one
// warpgroup adds up what it has, the other has the tensor cores. Two blocks are a cluster: each loads half of A for
// both where they have the same A.
#pragma once

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

#include "ops/cuda/ptx.cuh"
#include "ops/cuda/sm90_fragments.cuh"
#include "ops/cuda/sm90_grouped_schedule.cuh"

namespace tessera::cuda::sm90::fp8 {

inline constexpr int kTileI = kTileB, kTileJ = kTileA;  // what the schedule calls b and a
inline constexpr int kStep = mx::kWideBlock;            // k per step, in numbers and bytes
inline constexpr int kStages = 4;
inline constexpr int kCluster = 2;
inline constexpr int kWarpgroup = 128, kConsumers = 2;
inline constexpr int kThreads = kWarpgroup * (1 + kConsumers);
inline constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;
inline constexpr int kScaleSteps = 2;  // whose scales are loaded at once

inline constexpr int kPiece = kTileI / 2, kPieceBytes = kPiece * kStep;  // of A, for one copy
inline constexpr int kWaves = 2, kWaveRows = 64;                         // a warpgroup's products of 64 × 128
inline constexpr int kSums = kWaveRows * kTileJ / kWarpgroup;            // per thread and wave

struct alignas(1024) Shared {
  struct Stage {
    std::byte a[kTileI * kStep];
    std::byte b[kTileJ * kStep];
  };
  Stage stages[kStages];
  float scales_a[kStages][kTileI];  // forward: times b's
  float scales_b[kStages][kTileJ];  // wgrad
  ptx::Barrier full[kStages], empty[kStages];
  Groups groups;
};

struct Params {
  const std::int32_t* offsets_E1 = nullptr;
  int num_experts = 0, num_rows = 0;
  int m = 0, n = 0;
  Scales scales_a, scales_b;
  __nv_bfloat16* y_RM = nullptr;       // forward
  float* d_w_EMN = nullptr;            // wgrad
  std::int32_t* parts_done = nullptr;  // wgrad: [clusters, blocks, warpgroups], zero at the start
  bool accumulate = false;             // wgrad
};

/// Which buffer is next, and the parity of its barriers.
struct Position {
  int stage = 0;
  std::uint32_t parity = 0;
  __device__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

template <bool kWgrad>
struct Kernel {
  static constexpr int kScaleWarps = kWgrad ? 3 : 2;

  __device__ static auto schedule(const Params& p, const Groups& groups) {
    if constexpr (kWgrad) {
      return WgradSchedule<kStep>(groups, p.num_experts, ceil_div(p.n, kTileJ), ceil_div(p.m, kTileI), !p.accumulate);
    } else {
      return RowSchedule<true, kStep>(groups, p.num_experts, p.m, p.n);
    }
  }

  /// An expert without rows has a tile of zeros and nothing to sum.
  __device__ static int num_steps(const Work& work) {
    return kWgrad && work.row_end <= work.row_begin ? 0 : work.k_count;
  }
  /// Where A's i end for this expert.
  __device__ static int end_i(const Work& work, const Params& p) { return kWgrad ? p.m : work.row_end; }
  /// Halves of A that hold any i.
  __device__ static int num_pieces(const Work& work, const Params& p) {
    return end_i(work, p) - work.b > kPiece ? 2 : 1;
  }

  // --- Producers ---------------------------------------------------------------------------------------------------

  __device__ static void copy_operands(const CUtensorMap& map_a, const CUtensorMap& map_b, const Params& p,
                                       Shared& shared) {
    ptx::prefetch_tensor_map(&map_a);
    ptx::prefetch_tensor_map(&map_b);
    constexpr std::uint16_t kBoth = 0b11;
    const int rank = ptx::cluster_cta_rank();
    auto work_list = schedule(p, shared.groups);
    Work work;
    Position at{.parity = 1};
    while (work_list.next(work)) {
      const int pieces = num_pieces(work, p);
      for (int step = 0; step < num_steps(work); ++step, at.advance()) {
        const int k = (work.k_begin + step) * kStep + (kWgrad ? work.row_begin : 0);
        Shared::Stage& stage = shared.stages[at.stage];
        ptx::Barrier* full = &shared.full[at.stage];
        ptx::mbarrier_wait(&shared.empty[at.stage], at.parity);
        ptx::mbarrier_arrive_expect_tx(full, pieces * kPieceBytes + sizeof(stage.b));
        if constexpr (kWgrad) {
          ptx::tma_load_2d(stage.b, &map_b, full, k, work.a);
        } else {
          ptx::tma_load_3d(stage.b, &map_b, full, k, work.a, work.expert);
        }
        for (int piece = 0; piece < pieces; ++piece) {
          if (!work.b_is_shared) {
            ptx::tma_load_2d(stage.a + piece * kPieceBytes, &map_a, full, k, work.b + piece * kPiece);
          } else if (piece == rank) {
            ptx::tma_load_2d_multicast(stage.a + piece * kPieceBytes, &map_a, full, kBoth, k, work.b + piece * kPiece);
          }
        }
      }
    }
  }

  /// By each of kScaleWarps: those of half of A, or B's (wgrad). Loads are kScaleSteps steps ahead of the copies.
  template <bool kFloat>
  __device__ static void copy_scales(const Params& p, Shared& shared, int warp) {
    constexpr int kPerLane = kWgrad ? kTileJ / 32 : kPiece / 32;
    constexpr int kPerStep = kFloat ? 1 : kStep / mx::kBlock;
    const int lane = threadIdx.x % 32;
    const bool of_b = kWgrad && warp == kScaleWarps - 1;
    const Scales& scales = of_b ? p.scales_b : p.scales_a;
    const int rows = of_b ? kTileJ : kPiece;
    auto work_list = schedule(p, shared.groups);
    Work work;
    Position at{.parity = 1};
    while (work_list.next(work)) {
      const int first = (of_b ? work.a : work.b + warp * kPiece) + lane;
      const int end = min(of_b ? p.n : kWgrad ? p.m : p.num_rows, first - lane + rows);
      const int origin = work.k_begin + (kWgrad ? work.row_begin / kStep : 0), count = num_steps(work);
      const std::int64_t row_b =
          kFloat ? std::int64_t{work.expert} * ceil_div(p.m, mx::kWideBlock) + work.a / mx::kWideBlock
                 : std::int64_t{work.expert} * p.m + work.a;
      std::uint32_t next[kScaleSteps][kPerLane + 1];  // the last one: w's
      const auto load = [&](int begin) {
#pragma unroll
        for (int step = 0; step < kScaleSteps; ++step) {
          const int column = (origin + begin + step) * kPerStep;
#pragma unroll
          for (int i = 0; i < kPerLane; ++i) {
            const int row = first + 32 * i;
            next[step][i] = scales.load<kFloat>(row, column, row < end && begin + step < count);
          }
          if (!kWgrad) next[step][kPerLane] = p.scales_b.load<kFloat>(row_b, column, begin + step < count);
        }
      };
      load(0);
      for (int begin = 0; begin < count; begin += kScaleSteps) {
        std::uint32_t stored[kScaleSteps][kPerLane + 1];
#pragma unroll
        for (int step = 0; step < kScaleSteps; ++step) {
#pragma unroll
          for (int i = 0; i <= kPerLane; ++i) stored[step][i] = next[step][i];
        }
        load(begin + kScaleSteps);
#pragma unroll
        for (int step = 0; step < kScaleSteps; ++step) {
          if (begin + step >= count) break;
          float* to = (of_b ? shared.scales_b[at.stage] : shared.scales_a[at.stage] + warp * kPiece) + lane;
          const float weight = kWgrad ? 1 : Scales::value<kFloat>(stored[step][kPerLane]);
          ptx::mbarrier_wait(&shared.empty[at.stage], at.parity);
#pragma unroll
          for (int i = 0; i < kPerLane; ++i) {
            if (32 * i < rows) to[32 * i] = weight * Scales::value<kFloat>(stored[step][i]);
          }
          ptx::mbarrier_arrive(&shared.full[at.stage]);
          at.advance();
        }
      }
    }
  }

  // --- Consumers ---------------------------------------------------------------------------------------------------

  /// Of a wave in the tile.
  __device__ static int first_row(int wave, int warpgroup) { return (wave * kConsumers + warpgroup) * kWaveRows; }

  /// sum = a wave's rows · b over one step.
  __device__ static void multiply(float (&sum)[kSums], std::uint64_t a, std::uint64_t b) {
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kStep / 32; ++i) {
      ptx::Wgmma<kTileJ>::e4m3(sum, ptx::advance_descriptor(a, 32 * i), ptx::advance_descriptor(b, 32 * i), i > 0);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::wgmma_touch(sum);
  }

  /// d += the step's sums, scaled.
  __device__ static void promote(float (&d)[kSums], const float (&sum)[kSums], const float (&scale)[2],
                                 const float* scales_b) {
    const float* of_lane = scales_b + threadIdx.x % 4 * 2;
#pragma unroll
    for (int j = 0; j < kSums / 4; ++j) {
      if constexpr (kWgrad) {
        const float2 b = *reinterpret_cast<const float2*>(of_lane + 8 * j);
        d[4 * j] += scale[0] * b.x * sum[4 * j];
        d[4 * j + 1] += scale[0] * b.y * sum[4 * j + 1];
        d[4 * j + 2] += scale[1] * b.x * sum[4 * j + 2];
        d[4 * j + 3] += scale[1] * b.y * sum[4 * j + 3];
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) d[4 * j + i] += scale[i / 2] * sum[4 * j + i];
      }
    }
  }

  /// 64 × 128 of the gradient, 64 bytes of a row by four lanes.
  __device__ static void store_gradient(const float (&d)[kSums], float* d_w, std::int64_t stride, int rows, int columns,
                                        bool add) {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
    const int column = lane % 2 * 8 + lane % 4 / 2 * 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float* to = d_w + (row + 8 * half) * stride + column;
      const bool in_rows = row + 8 * half < rows;
#pragma unroll
      for (int i = 0; i < kSums / 8; ++i) {
        const float* pair = d + 8 * i + 2 * half;  // and the pair of the next 8 columns
        float4 sum{pair[0], pair[1], pair[4], pair[5]};
        exchange_pair(sum.x, sum.z);
        exchange_pair(sum.y, sum.w);
        if (!in_rows || 16 * i + column >= columns) continue;
        if (add) {
          ptx::red_add_v4(to + 16 * i, sum);
        } else {
          *reinterpret_cast<float4*>(to + 16 * i) = sum;
        }
      }
    }
  }

  __device__ static void write(const float (&d)[kWaves][kSums], const Work& work, const Params& p, int warpgroup) {
    const int end = end_i(work, p), columns = (kWgrad ? p.n : p.m) - work.a;
    const std::int64_t stride = kWgrad ? p.n : p.m;
#pragma unroll
    for (int wave = 0; wave < kWaves; ++wave) {
      const std::int64_t row = work.b + first_row(wave, warpgroup);
      const int rows = end - static_cast<int>(row);
      if (rows <= 0) continue;
      if constexpr (kWgrad) {
        store_gradient(d[wave], p.d_w_EMN + (std::int64_t{work.expert} * p.m + row) * stride + work.a, stride, rows,
                       columns, p.accumulate || !work.is_last_part);
      } else {
        store_rows(d[wave], p.y_RM + row * stride + work.a, stride, rows, columns);
      }
    }
  }

  /// Parts of a sum are written one after the other, last part first; the part after this one belongs to the next
  /// share's block of the same rank.
  template <typename Write>
  __device__ static void write_in_turn(const Work& work, std::int32_t* done, int warpgroup, Write&& write_part) {
    const bool first_thread = threadIdx.x % kWarpgroup == 0;
    if (!work.is_last_part) {
      if (first_thread) {
        while (ptx::load_acquire_gpu(done + kCluster * kConsumers) <= work.expert) {
        }
      }
      ptx::named_barrier_sync(1 + warpgroup, kWarpgroup);
    }
    write_part();
    if (!work.is_first_part) {
      __threadfence();
      ptx::named_barrier_sync(1 + warpgroup, kWarpgroup);
      if (first_thread) ptx::store_release_gpu(done, work.expert + 1);
    }
  }

  __device__ static void consume(const Params& p, Shared& shared) {
    const int warpgroup = ptx::warpgroup_idx() - 1, lane = threadIdx.x % 32;
    const int row = threadIdx.x / 32 % 4 * 16 + lane / 4;  // of a wave, this thread's first
    auto work_list = schedule(p, shared.groups);
    Work work;
    Position at;
    while (work_list.next(work)) {
      float d[kWaves][kSums];
#pragma unroll
      for (int wave = 0; wave < kWaves; ++wave) {
#pragma unroll
        for (int i = 0; i < kSums; ++i) d[wave][i] = 0;
      }
      const int rows = end_i(work, p) - work.b;
      for (int step = 0; step < num_steps(work); ++step, at.advance()) {
        const auto release = [&] {
          if (lane < kCluster) ptx::mbarrier_arrive_cluster(&shared.empty[at.stage], lane);
        };
        const Shared::Stage& stage = shared.stages[at.stage];
        ptx::mbarrier_wait(&shared.full[at.stage], at.parity);
        const std::uint64_t b = ptx::wgmma_descriptor<ptx::Major::kK>(stage.b);
        bool released = false;
#pragma unroll
        for (int wave = 0; wave < kWaves; ++wave) {
          const int first = first_row(wave, warpgroup);
          if (first < rows) {  // else the tensor cores are the others'
            const float* scales = &shared.scales_a[at.stage][first + row];
            const float scale[2] = {scales[0], scales[8]};
            float sum[kSums];
            multiply(sum, ptx::wgmma_descriptor<ptx::Major::kK>(stage.a + first * kStep), b);
            // The last wave's buffer is free; wgrad still reads scales.
            if (!kWgrad && wave == kWaves - 1) {
              release();
              released = true;
            }
            promote(d[wave], sum, scale, shared.scales_b[at.stage]);
          }
        }
        if (!released) release();
      }
      if (!work.store) continue;
      if constexpr (kWgrad) {
        std::int32_t* done =
            p.parts_done + (work_list.share() * kCluster + ptx::cluster_cta_rank()) * kConsumers + warpgroup;
        write_in_turn(work, done, warpgroup, [&] { write(d, work, p, warpgroup); });
      } else {
        write(d, work, p, warpgroup);
      }
    }
  }

  __device__ static void run(const CUtensorMap& map_a, const CUtensorMap& map_b, const Params& p, Shared& shared) {
    if (threadIdx.x == 0) {
      for (int i = 0; i < kStages; ++i) {
        ptx::mbarrier_init(&shared.full[i], 1 + 32 * kScaleWarps);
        ptx::mbarrier_init(&shared.empty[i], kCluster * kConsumers * kWarpgroup / 32);
      }
      ptx::fence_mbarrier_init();
    }
    if constexpr (kWgrad) {
      WgradSchedule<kStep>::load(shared.groups, p.offsets_E1, p.num_experts);
    } else {
      RowSchedule<true, kStep>::load(shared.groups, p.offsets_E1, p.num_experts, p.m);
    }
    ptx::cluster_sync();
    if (ptx::warpgroup_idx() == 0) {
      ptx::set_max_registers_down<kProducerRegisters>();
      const int warp = threadIdx.x / 32;
      if (threadIdx.x == 0) {
        copy_operands(map_a, map_b, p, shared);
      } else if (warp >= 1 && warp <= kScaleWarps) {
        if (p.scales_a.is_float) {
          copy_scales<true>(p, shared, warp - 1);
        } else {
          copy_scales<false>(p, shared, warp - 1);
        }
      }
    } else {
      ptx::set_max_registers_up<kConsumerRegisters>();
      consume(p, shared);
    }
    // A block stays while others of its cluster may still copy to it or arrive at its barriers.
    __syncthreads();
    ptx::cluster_sync();
  }
};

template <bool kWgrad>
__global__ void __launch_bounds__(kThreads, 1) __cluster_dims__(kCluster, 1, 1)
    blockwise_gemm(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
                   const __grid_constant__ Params params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) std::byte shared[];
  Kernel<kWgrad>::run(map_a, map_b, params, *reinterpret_cast<Shared*>(shared));
#endif
}

}  // namespace tessera::cuda::sm90::fp8
