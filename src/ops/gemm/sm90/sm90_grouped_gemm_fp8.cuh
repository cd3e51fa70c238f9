// The kernel of the blockwise products. It computes D[i, j] = Σ_k A[i, k] · B[j, k] in tiles of 256 × 128 or 128 × 256.
// FP8 tensor cores compute the sums S over 128 k, or over 256 k that share their scales. Registers accumulate D = Σ_s
// a[i, s] · b[j, s] · S_s[i, j] in float32. In both operands k is the contiguous dim, because FP8 WGMMA reads nothing
// else.
//
//            D       i      j         k      A              B
//   forward  y       rows   columns   N      x   [R, N]     w   [E, M, N], one b for all j
//   wgrad    d_w[e]  M      N         rows   d_yᵀ [M, R]    xᵀ  [N, R]
//
// One block per SM lives as long as the launch. Warp 0 copies operands with TMA into kStages buffers. In the forward,
// the next two warps copy the scales. In wgrad, each sum has two scales per step. An earlier kernel puts them in the
// order of use, so that warp 0 copies them with the operands. If 128 columns of x share a scale, as in the forward 128
// rows of w do, one multiplication per sum is enough.
//
// Two warpgroups multiply, each for half of the tile, as two products of 64 × 128 one after the other. While one
// warpgroup adds up its sums, the other uses the tensor cores. Two blocks form a cluster. If both need the same part of
// the large operand, each loads half of it for both.
#pragma once

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

#include "ops/gemm/sm90/sm90_fragments.cuh"
#include "ops/gemm/sm90/sm90_grouped_schedule.cuh"
#include "ops/gemm/sm90/sm90_ring.cuh"
#include "ops/kit/ptx.cuh"

namespace tessera::cuda::sm90::fp8 {

inline constexpr int kLarge = kTileB, kSmall = kTileA;  // sides of a tile, which the schedule calls b and a
inline constexpr int kStep = mx::kWideBlock;            // k per step, in numbers and bytes
inline constexpr int kStages = 4;
template <bool kWgrad>
inline constexpr int kProducerRegisters = kWgrad ? 40 : 72;
template <bool kWgrad>
inline constexpr int kConsumerRegisters = kWgrad ? 232 : 216;
// The scales of this many steps are loaded at once.
inline constexpr int kScaleSteps = 2;

// The rows of an operand that one copy brings.
inline constexpr int kBox = 128, kBoxBytes = kBox * kStep;
// A warpgroup computes kWaves products of 64 × 128, one after the other.
inline constexpr int kWaves = 2, kWaveRows = 64;
inline constexpr int kSums = kWaveRows * kBox / kWarpgroup;  // per thread and wave

struct alignas(1024) Shared {
  struct Stage {
    std::byte large[kLarge * kStep];
    std::byte small[kSmall * kStep];
  };
  Stage stages[kStages];
  WarpBuffer buffers[kConsumers * kWarpgroup / 32];
  alignas(128) float scales_large[kStages][kLarge];  // forward: A's scales times B's
  float scales_small[kStages][kSmall];               // wgrad only
  Ring<kStages> ring;
  Groups groups;
};

struct Params {
  const std::int32_t* offsets_E1 = nullptr;  // null: one expert has all rows
  int num_experts = 0, num_rows = 0;
  int m = 0, n = 0;
  Scales scales_a{}, scales_b{};                                     // forward
  const float *arranged_large = nullptr, *arranged_small = nullptr;  // wgrad: written by prepare_wgrad
  __nv_bfloat16* y_RM = nullptr;                                     // forward
  float* d_w_EMN = nullptr;                                          // wgrad
  std::int32_t* parts_done = nullptr;                                // wgrad: for PartTurn
  bool accumulate = false;                                           // wgrad
};

/// Returns the position of the scale of column j in a group of 128. A thread of a quad loads the scales of its columns
/// four at a time.
__host__ __device__ constexpr int scale_position(int j) { return j / 16 * 16 + j % 8 / 2 * 4 + j / 8 % 2 * 2 + j % 2; }
/// Returns how many floats n arranged scales of a step take up.
__host__ __device__ constexpr int arranged_row(int n) { return ceil_div(n, kLarge) * kLarge; }

/// Computes tiles of D. If kWide is set, a tile is 128 × 256, not 256 × 128, and a warpgroup's waves lie side by side.
/// If kSquare is set, b is the same for 128 neighbouring j. In the forward, kStepsPerSum steps of k share their scales:
/// the first and second, the third and fourth, and so on.
template <bool kWgrad, bool kWide, bool kSquare, int kStepsPerSum>
struct Kernel {
  static_assert(kWgrad || (!kWide && kSquare));
  static_assert(kStepsPerSum == 1 || (!kWgrad && kStepsPerSum == 2));
  static constexpr int kScaleWarps = kWgrad ? 0 : 2;
  using Position = Ring<kStages>::Position;

  __device__ static auto schedule(const Params& p, const Groups& groups) {
    if constexpr (kWgrad) {
      return WgradSchedule<kStep>(groups, p.num_experts, ceil_div(kWide ? p.m : p.n, kSmall),
                                  ceil_div(kWide ? p.n : p.m, kLarge), !p.accumulate);
    } else {
      return RowSchedule<true, kStep>(groups, p.num_experts, p.m, p.n);
    }
  }

  /// Returns the number of steps. An expert without rows has a tile of zeros and nothing to sum.
  __device__ static int num_steps(const Work& work) {
    return kWgrad && work.row_end <= work.row_begin ? 0 : work.k_count;
  }
  __device__ static int first_i(const Work& work) { return kWide ? work.a : work.b; }
  __device__ static int first_j(const Work& work) { return kWide ? work.b : work.a; }
  /// Returns the end of the index i for this expert.
  __device__ static int end_i(const Work& work, const Params& p) { return kWgrad ? p.m : work.row_end; }
  __device__ static int end_j(const Params& p) { return kWgrad ? p.n : p.m; }
  /// Returns how many halves of the large operand's part contain data.
  __device__ static int num_boxes(const Work& work, const Params& p) {
    return (kWide ? end_j(p) : end_i(work, p)) - work.b > kBox ? 2 : 1;
  }

  // --- Producers ---------------------------------------------------------------------------------------------------

  __device__ static void copy_operands(const CUtensorMap& map_large, const CUtensorMap& map_small, const Params& p,
                                       Shared& shared) {
    ptx::prefetch_tensor_map(&map_large);
    ptx::prefetch_tensor_map(&map_small);
    constexpr std::uint16_t kBoth = 0b11;
    const int rank = ptx::cluster_cta_rank();
    auto work_list = schedule(p, shared.groups);
    Work work;
    auto at = shared.ring.begin_producer();
    while (work_list.next(work)) {
      const int boxes = num_boxes(work, p);
      for (int step = 0; step < num_steps(work); ++step, at.advance()) {
        const int k = (work.k_begin + step) * kStep + (kWgrad ? work.row_begin : 0);
        Shared::Stage& stage = shared.stages[at.stage];
        ptx::Barrier* full = &shared.ring.full[at.stage];
        shared.ring.wait_empty(at);
        constexpr std::uint32_t kScaleBytes = kWgrad ? sizeof(float) * (kLarge + kSmall) : 0;
        ptx::mbarrier_arrive_expect_tx(full, boxes * kBoxBytes + sizeof(stage.small) + kScaleBytes);
        if constexpr (kWgrad) {
          ptx::tma_load_2d(stage.small, &map_small, full, k, work.a);
          const std::int64_t block = k / kStep, row_large = arranged_row(kWide ? p.n : p.m);
          const std::int64_t row_small = arranged_row(kWide ? p.m : p.n);
          ptx::bulk_load(shared.scales_large[at.stage], p.arranged_large + block * row_large + work.b,
                         sizeof(float) * kLarge, full);
          ptx::bulk_load(shared.scales_small[at.stage], p.arranged_small + block * row_small + work.a,
                         sizeof(float) * kSmall, full);
        } else {
          ptx::tma_load_3d(stage.small, &map_small, full, k, work.a, work.expert);
        }
        for (int box = 0; box < boxes; ++box) {
          std::byte* to = stage.large + box * kBoxBytes;
          if (!work.b_is_shared) {
            ptx::tma_load_2d(to, &map_large, full, k, work.b + box * kBox);
          } else if (box == rank) {
            ptx::tma_load_2d_multicast(to, &map_large, full, kBoth, k, work.b + box * kBox);
          }
        }
      }
    }
  }

  /// Copies the scales of half of A, times those of B. Only the forward uses it, and each of kScaleWarps warps executes
  /// it. Loads are kScaleSteps steps ahead of the copies.
  template <bool kFloat>
  __device__ static void copy_scales(const Params& p, Shared& shared, int warp) {
    constexpr int kPerLane = kBox / 32;
    constexpr int kPerStep = kFloat ? 1 : kStep / mx::kBlock;
    const int lane = threadIdx.x % 32;
    auto work_list = schedule(p, shared.groups);
    Work work;
    auto at = shared.ring.begin_producer();
    while (work_list.next(work)) {
      const int first = work.b + warp * kBox + lane;
      const int count = num_steps(work);
      const std::int64_t row_b =
          kFloat ? std::int64_t{work.expert} * ceil_div(p.m, mx::kWideBlock) + work.a / mx::kWideBlock
                 : std::int64_t{work.expert} * p.m + work.a;
      std::uint32_t next[kScaleSteps][kPerLane + 1];  // the last one is w's
      const auto load = [&](int begin) {
#pragma unroll
        for (int step = 0; step < kScaleSteps; ++step) {
          const int column = (begin + step) * kPerStep;
#pragma unroll
          for (int i = 0; i < kPerLane; ++i) {
            const int row = first + 32 * i;
            next[step][i] = p.scales_a.load<kFloat>(row, column, row < p.num_rows && begin + step < count);
          }
          next[step][kPerLane] = p.scales_b.load<kFloat>(row_b, column, begin + step < count);
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
          float* to = shared.scales_large[at.stage] + warp * kBox + lane;
          const float weight = Scales::value<kFloat>(stored[step][kPerLane]);
          shared.ring.wait_empty(at);
#pragma unroll
          for (int i = 0; i < kPerLane; ++i) {
            to[32 * i] = weight * Scales::value<kFloat>(stored[step][i]);
          }
          ptx::mbarrier_arrive(&shared.ring.full[at.stage]);
          at.advance();
        }
      }
    }
  }

  // --- Consumers ---------------------------------------------------------------------------------------------------

  /// Return where a wave begins in the tile.
  __device__ static int wave_i(int wave, int warpgroup) {
    return kWide ? warpgroup * kWaveRows : (wave * kConsumers + warpgroup) * kWaveRows;
  }
  __device__ static int wave_j(int wave) { return kWide ? wave * kBox : 0; }

  /// Assigns to `sum` the product of a wave's rows and b over one step, or adds it.
  __device__ static void multiply(float (&sum)[kSums], const std::byte* a_rows, const std::byte* b_rows,
                                  bool accumulate) {
    const std::uint64_t a = ptx::wgmma_descriptor<ptx::Major::kK>(a_rows);
    const std::uint64_t b = ptx::wgmma_descriptor<ptx::Major::kK>(b_rows);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kStep / 32; ++i) {
      ptx::Wgmma<kBox>::e4m3(sum, ptx::advance_descriptor(a, 32 * i), ptx::advance_descriptor(b, 32 * i),
                             accumulate || i > 0);
    }
    ptx::wgmma_commit();
  }
  __device__ static void finish(float (&sum)[kSums]) {
    ptx::wgmma_wait<0>();
    ptx::wgmma_touch(sum);
  }

  /// Adds the step's scaled sums to d, where 128 columns share a scale.
  __device__ static void add(float (&d)[kSums], const float (&sum)[kSums], const float (&scale)[2]) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) d[i] += scale[i / 2 % 2] * sum[i];
  }

  /// Holds this thread's scales of 128 columns.
  struct ColumnScales {
    static constexpr int kGroups = kSums / 8;  // Each load brings one group.
    float of_group[kGroups][4];

    __device__ void load(const float* scales, int begin, int end) {
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        if (group < begin || group >= end) continue;
        const float4 four = reinterpret_cast<const float4*>(scales)[threadIdx.x % 4 + 4 * group];
        of_group[group][0] = four.x;
        of_group[group][1] = four.y;
        of_group[group][2] = four.z;
        of_group[group][3] = four.w;
      }
    }
  };

  /// Waits for the sums and adds them to d, times both scales, where each column has its own. Waves that lie one above
  /// the other have the same columns and share their scales. Waves that lie side by side load the first scales while
  /// their sums are computed. They load the others afterwards, because registers are scarce. Sums are scaled in place,
  /// because products of two scales would need further registers.
  __device__ static void finish_and_add(float (&d)[kSums], float (&sum)[kSums], const float (&scale)[2],
                                        const float* scales_j, ColumnScales& columns, bool is_first_wave) {
    constexpr int kEarly = kWide ? 2 : ColumnScales::kGroups;
    if (kWide || is_first_wave) columns.load(scales_j, 0, kEarly);
    finish(sum);
    if (kWide) columns.load(scales_j, kEarly, ColumnScales::kGroups);
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      d[i] += columns.of_group[i / 8][i % 8 / 4 * 2 + i % 2] * sum[i] * scale[i / 2 % 2];
    }
  }

  /// Writes a warp's part of 64 × 128 of the gradient from registers. Four lanes write 64 bytes of a row.
  __device__ static void assign_gradient(const float (&d)[kSums], float* d_w, std::int64_t stride, int rows,
                                         int columns) {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
    const int column = lane % 2 * 8 + lane % 4 / 2 * 4;  // after the exchange
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float* to = d_w + (row + 8 * half) * stride + column;
      const bool in_rows = row + 8 * half < rows;
#pragma unroll
      for (int i = 0; i < kSums / 8; ++i) {
        // The pair of the next 8 columns begins at pair[4].
        const float* pair = d + 8 * i + 2 * half;
        float4 sum{pair[0], pair[1], pair[4], pair[5]};
        exchange_pair(sum.x, sum.z);
        exchange_pair(sum.y, sum.w);
        if (in_rows && 16 * i + column < columns) *reinterpret_cast<float4*>(to + 16 * i) = sum;
      }
    }
  }

  /// Adds a warp's part to the gradient in memory, in whole lines that pass through shared memory. Reductions in memory
  /// profit from whole lines. Plain stores are faster without the detour.
  __device__ static void add_gradient(const float (&d)[kSums], float* d_w, std::int64_t stride, int rows, int columns,
                                      WarpBuffer& buffer) {
    constexpr int kRoundColumns = WarpBuffer::kRowBytes / 4;
    const int lane = threadIdx.x % 32, first_row = threadIdx.x / 32 % 4 * 16;
#pragma unroll
    for (int round = 0; round < kBox / kRoundColumns; ++round) {
#pragma unroll
      for (int block = 0; block < kRoundColumns / 8; ++block) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int i = 4 * (round * (kRoundColumns / 8) + block) + 2 * half;
          std::byte* to = buffer.at(lane / 4 + 8 * half, 2 * block + lane % 4 / 2) + lane % 2 * 8;
          *reinterpret_cast<float2*>(to) = float2{d[i], d[i + 1]};
        }
      }
      buffer.drain([&](int row, int chunk, uint4 bytes) {
        const int column = round * kRoundColumns + chunk * 4;
        if (first_row + row >= rows || column >= columns) return;
        ptx::red_add_v4(d_w + (first_row + row) * stride + column, __builtin_bit_cast(float4, bytes));
      });
    }
  }

  __device__ static void write(const float (&d)[kWaves][kSums], const Work& work, const Params& p, int warpgroup,
                               WarpBuffer& buffer) {
    const std::int64_t stride = end_j(p);
#pragma unroll
    for (int wave = 0; wave < kWaves; ++wave) {
      const std::int64_t row = first_i(work) + wave_i(wave, warpgroup);
      const int column = first_j(work) + wave_j(wave);
      const int rows = end_i(work, p) - static_cast<int>(row), columns = end_j(p) - column;
      if (rows <= 0 || columns <= 0) continue;
      if constexpr (kWgrad) {
        float* d_w = p.d_w_EMN + (std::int64_t{work.expert} * p.m + row) * stride + column;
        if (p.accumulate || !work.is_last_part) {
          add_gradient(d[wave], d_w, stride, rows, columns, buffer);
        } else {
          assign_gradient(d[wave], d_w, stride, rows, columns);
        }
      } else {
        store_rows(d[wave], p.y_RM + row * stride + column, stride, rows, columns, buffer);
      }
    }
  }

  /// Writes a part of a sum when it is its turn. The whole warpgroup executes it.
  template <typename Write>
  __device__ static void write_in_turn(const Work& work, const PartTurn& turn, int warpgroup, Write&& write_part) {
    const bool first_thread = threadIdx.x % kWarpgroup == 0;
    if (!work.is_last_part) {
      if (first_thread) turn.await(work);
      ptx::named_barrier_sync(1 + warpgroup, kWarpgroup);
    }
    write_part();
    if (!work.is_first_part) {
      __threadfence();
      ptx::named_barrier_sync(1 + warpgroup, kWarpgroup);
      if (first_thread) turn.pass(work);
    }
  }

  /// Adds to d the scaled sums over kSteps steps, whose buffers begin at `at`, and goes on to the next buffer. The tile
  /// has `rows` rows and `columns` columns of data. `row` is this thread's first row of a wave.
  template <int kSteps>
  __device__ static void add_sum(float (&d)[kWaves][kSums], Position& at, Shared& shared, int rows, int columns,
                                 int row, int warpgroup) {
    const int first = at.stage;
    const float* scales_i = kWide ? shared.scales_small[first] : shared.scales_large[first];
    const float* scales_j = kWide ? shared.scales_large[first] : shared.scales_small[first];
    shared.ring.wait_full(at);
    if constexpr (kSteps == 2) at.advance();
    bool released = false;
    ColumnScales columns_j;
#pragma unroll
    for (int wave = 0; wave < kWaves; ++wave) {
      const int i = wave_i(wave, warpgroup), j = wave_j(wave);
      // A wave without data is skipped. The other warpgroup then has the tensor cores to itself.
      if (i < rows && j < columns) {
        float scale[2] = {scales_i[i + row], scales_i[i + row + 8]};
        if constexpr (kWgrad && kSquare) {
          const float of_columns = scales_j[j];
          scale[0] *= of_columns, scale[1] *= of_columns;
        }
        float sum[kSums];
        const auto multiply_stage = [&](const Shared::Stage& of, bool accumulate) {
          multiply(sum, (kWide ? of.small : of.large) + i * kStep, (kWide ? of.large : of.small) + j * kStep,
                   accumulate);
        };
        multiply_stage(shared.stages[first], false);
        if constexpr (kSteps == 2) {
          if (wave == 0) shared.ring.wait_full(at);
          multiply_stage(shared.stages[at.stage], true);
        }
        if constexpr (!kSquare) {
          finish_and_add(d[wave], sum, scale, scales_j + j, columns_j, wave == 0);
        } else {
          // Nothing reads a stage after its last product.
          if constexpr (kSteps == 2) {
            if (wave == kWaves - 1) {
              ptx::wgmma_wait<1>();
              shared.ring.release(first);
            }
          }
          finish(sum);
          if (wave == kWaves - 1) {
            shared.ring.release(at.stage);
            released = true;
          }
          add(d[wave], sum, scale);
        }
      } else if (kSteps == 2 && wave == 0) {
        // Without this wait, a warp could release a buffer twice in one phase.
        shared.ring.wait_full(at);
      }
    }
    if (!released) {
      if constexpr (kSteps == 2) shared.ring.release(first);
      shared.ring.release(at.stage);
    }
    at.advance();
  }

  __device__ static void consume(const Params& p, Shared& shared) {
    const int warpgroup = ptx::warpgroup_idx() - 1, lane = threadIdx.x % 32;
    const int row = threadIdx.x / 32 % 4 * 16 + lane / 4;  // this thread's first row of a wave
    auto work_list = schedule(p, shared.groups);
    Work work;
    auto at = shared.ring.begin_consumer();
    while (work_list.next(work)) {
      float d[kWaves][kSums];
#pragma unroll
      for (int wave = 0; wave < kWaves; ++wave) {
#pragma unroll
        for (int i = 0; i < kSums; ++i) d[wave][i] = 0;
      }
      const int rows = end_i(work, p) - first_i(work), columns = end_j(p) - first_j(work);
      const int steps = num_steps(work);
      for (int step = 0; step + kStepsPerSum <= steps; step += kStepsPerSum) {
        add_sum<kStepsPerSum>(d, at, shared, rows, columns, row, warpgroup);
      }
      if (steps % kStepsPerSum != 0) add_sum<1>(d, at, shared, rows, columns, row, warpgroup);
      if (!work.store) continue;
      WarpBuffer& buffer = shared.buffers[threadIdx.x / 32 - kWarpgroup / 32];
      if constexpr (kWgrad) {
        const PartTurn turn(p.parts_done, work_list.share(), warpgroup);
        write_in_turn(work, turn, warpgroup, [&] { write(d, work, p, warpgroup, buffer); });
      } else {
        write(d, work, p, warpgroup, buffer);
      }
    }
  }

  __device__ static void run(const CUtensorMap& map_large, const CUtensorMap& map_small, const Params& p,
                             Shared& shared) {
    const auto load = [&] {
      if constexpr (kWgrad) {
        p.offsets_E1 == nullptr ? WgradSchedule<kStep>::set_one(shared.groups, p.num_rows)
                                : WgradSchedule<kStep>::load(shared.groups, p.offsets_E1, p.num_experts);
      } else {
        p.offsets_E1 == nullptr ? RowSchedule<true, kStep>::set_one(shared.groups, p.num_rows, p.m)
                                : RowSchedule<true, kStep>::load(shared.groups, p.offsets_E1, p.num_experts, p.m);
      }
    };
    const auto produce = [&] {
      const int warp = threadIdx.x / 32;
      if (threadIdx.x == 0) {
        copy_operands(map_large, map_small, p, shared);
      } else if (!kWgrad && warp >= 1 && warp <= kScaleWarps) {
        if (p.scales_a.is_float) {
          copy_scales<true>(p, shared, warp - 1);
        } else {
          copy_scales<false>(p, shared, warp - 1);
        }
      }
    };
    run_block<kProducerRegisters<kWgrad>, kConsumerRegisters<kWgrad>>(shared.ring, 1 + 32 * kScaleWarps, load, produce,
                                                                      [&] { consume(p, shared); });
  }
};

template <bool kWgrad, bool kWide, bool kSquare, int kStepsPerSum = 1>
__global__ void __launch_bounds__(kThreads, 1) __cluster_dims__(kCluster, 1, 1)
    blockwise_gemm(const __grid_constant__ CUtensorMap map_large, const __grid_constant__ CUtensorMap map_small,
                   const __grid_constant__ Params params) {
  if constexpr (ptx::kIsSm90a) {
    extern __shared__ __align__(1024) std::byte shared[];
    Kernel<kWgrad, kWide, kSquare, kStepsPerSum>::run(map_large, map_small, params, *reinterpret_cast<Shared*>(shared));
  } else {
    ptx::trap_on_other_architecture("blockwise_gemm");
  }
}

// --- wgrad's scales ------------------------------------------------------------------------------------------------

struct ScaleRows {
  Scales scales;
  int count = 0;              // number of rows
  float* arranged = nullptr;  // [num_steps, arranged_row(count)]
};

inline constexpr int kArrangeTile = 32, kArrangeRows = 8;

/// Writes the scales of A and B step by step, B's in the order of scale_position. Sets parts_done to zero. The grid
/// covers num_steps and the arranged_row of both operands, each in units of kArrangeTile. A block has kArrangeTile ×
/// kArrangeRows threads.
template <bool kFloat>
__global__ void prepare_wgrad(ScaleRows a, ScaleRows b, int num_steps, std::int32_t* parts_done, int num_parts) {
  __shared__ float tile[kArrangeTile][kArrangeTile + 1];
  const int tiles_a = arranged_row(a.count) / kArrangeTile, x = threadIdx.x, tile_j = blockIdx.y;
  const bool of_a = tile_j < tiles_a;
  // The scales are copied by value. If the kernel chose between two structs, the compiler would put both in memory.
  const Scales scales{.data = of_a ? a.scales.data : b.scales.data, .stride = of_a ? a.scales.stride : b.scales.stride};
  const int count = of_a ? a.count : b.count;
  float* arranged = of_a ? a.arranged : b.arranged;
  const int step0 = blockIdx.x * kArrangeTile, j0 = (of_a ? tile_j : tile_j - tiles_a) * kArrangeTile;
  if (blockIdx.x == 0 && tile_j == 0) {
    for (int i = threadIdx.y * kArrangeTile + x; i < num_parts; i += kArrangeTile * kArrangeRows) parts_done[i] = 0;
  }
  constexpr int kPerStep = kFloat ? 1 : kStep / mx::kBlock;
#pragma unroll
  for (int i = 0; i < kArrangeTile / kArrangeRows; ++i) {
    const int y = threadIdx.y + i * kArrangeRows;
    const bool inside = j0 + y < count && step0 + x < num_steps;
    tile[y][x] = Scales::value<kFloat>(scales.load<kFloat>(j0 + y, (step0 + x) * kPerStep, inside));
  }
  __syncthreads();
  const int at = of_a ? j0 + x : j0 / kBox * kBox + scale_position(j0 % kBox + x);
  for (int y = threadIdx.y; y < kArrangeTile && step0 + y < num_steps; y += kArrangeRows) {
    arranged[std::int64_t{step0 + y} * arranged_row(count) + at] = tile[x][y];
  }
}

}  // namespace tessera::cuda::sm90::fp8
