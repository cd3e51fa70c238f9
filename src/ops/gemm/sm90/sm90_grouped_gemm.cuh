// The kernel of the three grouped products. It computes D[a, b] = Σ_k A[a, k] · B[b, k] in tiles of 128 × 256, in
// float32.
//
//            D                        a        b        k        A             B
//   forward  y, or yᵀ if transposed   rows     columns  N        x   K-major   w   K-major
//   dgrad    d_x, or d_xᵀ             rows     columns  M        d_y K-major   w   MN-major
//   wgrad    d_w[e], or d_w[e]ᵀ       M        N        rows     d_y MN-major  x   MN-major
//
// In the transposed form the operands change places. A tile then has 256 rows and 128 columns instead of 128 and 256.
// This form serves matrices whose size is far from a multiple of 256.
//
// One block per SM lives as long as the launch. Its first warp copies operands with TMA into a ring of stages. Two
// warpgroups multiply with WGMMA (m64n256), each for half of the tile. They write the tile through shared memory while
// the next tile's operands arrive. Two blocks form a cluster. If both have the same b, each loads half of it for both.
// A buffer is refilled when the warpgroups of both blocks have read it.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "ops/gemm/sm90/sm90_grouped_schedule.cuh"
#include "ops/gemm/sm90/sm90_ring.cuh"
#include "ops/kit/ptx.cuh"

namespace tessera::cuda::sm90 {

enum class Product { kForward, kDgrad, kWgrad };

inline constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;
inline constexpr int kBox = 128;  // length along m or n of one TMA copy of an operand, for one block or for both
inline constexpr int kAtom = 64;  // length along m or n of the swizzle atoms of an MN-major operand

// Results leave in rounds of 8 KiB per warpgroup. A round is 64 × 64 bfloat16 or 64 × 32 float32 (transposed 32 × 64).
// A float32 round consists of two boxes of 32 × 32.
inline constexpr int kRoundBytes = 8192;
inline constexpr int kOutputBox = 64;     // bfloat16: rows and columns
inline constexpr int kGradientBox = 32;   // float32: rows and columns
inline constexpr int kSwizzledRow = 128;  // bytes

/// Defines how a product divides the 227 KiB of shared memory. Float32 results have twice the bytes of bfloat16 ones.
/// They get more room, so that they drain while the next tile is multiplied.
template <Product kProduct>
struct Sizes {
  static constexpr bool kWgrad = kProduct == Product::kWgrad;
  static constexpr int kStepK = kWgrad ? 32 : 64;
  static constexpr int kStages = kWgrad ? 5 : 4;
  static constexpr int kRoundBuffers = kWgrad ? 6 : 2;  // per warpgroup
  static constexpr int kBoxBytes = kBox * kStepK * 2, kAtomBytes = kAtom * kStepK * 2;
  static constexpr int kBytesA = kTileA * kStepK * 2, kBytesB = kTileB * kStepK * 2, kStageBytes = kBytesA + kBytesB;
};

template <Product kProduct>
struct alignas(1024) Shared {
  using S = Sizes<kProduct>;
  struct Stage {
    std::byte a[S::kBytesA];
    std::byte b[S::kBytesB];
  };
  Stage stages[S::kStages];
  std::byte rounds[kConsumers][S::kRoundBuffers][kRoundBytes];
  Ring<S::kStages> ring;
  Groups groups;
};

struct Params {
  const std::int32_t* offsets_E1 = nullptr;
  int num_experts = 0;
  int m = 0, n = 0;
  // The forward and dgrad write tiles here directly where TMA would write too many rows.
  __nv_bfloat16* output = nullptr;
  std::int32_t* parts_done = nullptr;  // wgrad: for PartTurn
  bool accumulate = false;
};

template <Product kProduct, bool kTransposed>
struct Kernel : Sizes<kProduct> {
  using S = Sizes<kProduct>;
  using S::kBytesA, S::kBytesB, S::kAtomBytes, S::kBoxBytes, S::kRoundBuffers, S::kStageBytes, S::kStages;
  using S::kStepK, S::kWgrad;
  using Shared = sm90::Shared<kProduct>;
  using Stage = typename Shared::Stage;
  // These are the majors of A and of B in the form that is not transposed.
  static constexpr ptx::Major kRowMajor = kWgrad ? ptx::Major::kMN : ptx::Major::kK;
  static constexpr ptx::Major kOtherMajor = kProduct == Product::kForward ? ptx::Major::kK : ptx::Major::kMN;
  static constexpr ptx::Major kMajorA = kTransposed ? kOtherMajor : kRowMajor;
  static constexpr ptx::Major kMajorB = kTransposed ? kRowMajor : kOtherMajor;
  // Weights are 3-D, so that a tile reads the weights of one expert only.
  static constexpr bool kWeightIsA = !kWgrad && kTransposed, kWeightIsB = !kWgrad && !kTransposed;

  __device__ static int columns(const Params& p) { return kProduct == Product::kForward ? p.m : p.n; }

  __device__ static auto schedule(const Params& p, const Groups& groups) {
    if constexpr (kWgrad) {
      return WgradSchedule<kStepK>(groups, p.num_experts, ceil_div(kTransposed ? p.n : p.m, kTileA),
                                   ceil_div(kTransposed ? p.m : p.n, kTileB), !p.accumulate);
    } else {
      return RowSchedule<kTransposed, kStepK>(groups, p.num_experts, columns(p),
                                              kProduct == Product::kForward ? p.n : p.m);
    }
  }

  static constexpr int kLead = 2;  // steps by which the second warpgroup starts later
  static constexpr int kStartBarrier = 1 + kConsumers;

  // --- Producer ----------------------------------------------------------------------------------------------------

  template <ptx::Major kMajor, bool kIsWeight>
  __device__ static void load_box(std::byte* shared, const CUtensorMap* map, ptx::Barrier* barrier, int mn, int k,
                                  int expert, bool multicast) {
    constexpr std::uint16_t kBoth = 0b11;
    const auto load = [&](std::byte* to, int c0, int c1) {
      if constexpr (kIsWeight) {
        if (multicast) {
          ptx::tma_load_3d_multicast(to, map, barrier, kBoth, c0, c1, expert);
        } else {
          ptx::tma_load_3d(to, map, barrier, c0, c1, expert);
        }
      } else {
        if (multicast) {
          ptx::tma_load_2d_multicast(to, map, barrier, kBoth, c0, c1);
        } else {
          ptx::tma_load_2d(to, map, barrier, c0, c1);
        }
      }
    };
    if constexpr (kMajor == ptx::Major::kK) {
      load(shared, k, mn);
    } else {
      load(shared, mn, k);
      load(shared + kAtomBytes, mn + kAtom, k);
    }
  }

  __device__ static void produce(const CUtensorMap& map_a, const CUtensorMap& map_b, const Params& p, Shared& shared) {
    ptx::prefetch_tensor_map(&map_a);
    ptx::prefetch_tensor_map(&map_b);
    const int rank = ptx::cluster_cta_rank();
    auto work_list = schedule(p, shared.groups);
    Work work;
    auto at = shared.ring.begin_producer();
    while (work_list.next(work)) {
      const int k_origin = work.k_begin * kStepK + (kWgrad ? work.row_begin : 0);
      for (int step = 0; step < work.k_count; ++step, at.advance()) {
        const int k = k_origin + step * kStepK;
        ptx::Barrier* full = &shared.ring.full[at.stage];
        Stage& stage = shared.stages[at.stage];
        shared.ring.wait_empty(at);
        ptx::mbarrier_arrive_expect_tx(full, kStageBytes);
        load_box<kMajorA, kWeightIsA>(stage.a, &map_a, full, work.a, k, work.expert, false);
        if (work.b_is_shared) {
          load_box<kMajorB, kWeightIsB>(stage.b + rank * kBoxBytes, &map_b, full, work.b + rank * kBox, k, work.expert,
                                        true);
        } else {
          load_box<kMajorB, kWeightIsB>(stage.b, &map_b, full, work.b, k, work.expert, false);
          load_box<kMajorB, kWeightIsB>(stage.b + kBoxBytes, &map_b, full, work.b + kBox, k, work.expert, false);
        }
      }
    }
  }

  // --- Consumers ---------------------------------------------------------------------------------------------------

  /// Zeros the rows of other experts, and what lies beyond all of them, in both operands of wgrad. Both operands need
  /// it, because 0 · NaN is NaN. Both warpgroups zero b, the second one over the first one's zeros. Then neither waits
  /// for the other.
  __device__ static void mask_rows(Stage& stage, int warpgroup, int num_valid) {
    const auto zero = [&](std::byte* chunk) {
      for (int i = num_valid * kSwizzledRow + threadIdx.x % kWarpgroup * 16; i < kAtomBytes; i += kWarpgroup * 16) {
        *reinterpret_cast<uint4*>(chunk + i) = uint4{};
      }
    };
    zero(stage.a + warpgroup * kAtomBytes);
    for (int atom = 0; atom < kTileB / kAtom; ++atom) zero(stage.b + atom * kAtomBytes);
    ptx::fence_proxy_async_shared();
    ptx::named_barrier_sync(1 + warpgroup, kWarpgroup);
  }

  /// Multiplies one step of k, for this warpgroup's half of a.
  __device__ static void multiply(float (&d)[128], const Stage& stage, int warpgroup, bool accumulate) {
    constexpr auto step_bytes = [](ptx::Major major) { return major == ptx::Major::kK ? 32u : 16u * kSwizzledRow; };
    const std::uint64_t a = ptx::wgmma_descriptor<kMajorA>(stage.a + warpgroup * (kBytesA / kConsumers), kAtomBytes);
    const std::uint64_t b = ptx::wgmma_descriptor<kMajorB>(stage.b, kAtomBytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kStepK / 16; ++i) {
      ptx::Wgmma<kTileB>::bf16<kMajorA, kMajorB>(d, ptx::advance_descriptor(a, i * step_bytes(kMajorA)),
                                                 ptx::advance_descriptor(b, i * step_bytes(kMajorB)),
                                                 accumulate || i > 0);
    }
    ptx::wgmma_commit();
  }

  __device__ static std::byte* swizzled(std::byte* base, int row, int chunk) {
    return base + row * kSwizzledRow + ((chunk ^ (row & 7)) << 4);
  }

  /// Holds the first row and column of the output of a warpgroup's round.
  struct OutputBlock {
    int row, column;
  };

  /// Stages a round of 64 × 64 sums as bfloat16.
  template <int kRound>
  __device__ static void stage_output(const float (&d)[128], std::byte* buffer) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int matrix = lane / 8, in_matrix = lane % 8;
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {  // pairs of blocks of 8 b
      const int i = 4 * (8 * kRound + 2 * pair);
      const std::uint32_t r0 = ptx::pack_bf16(d[i], d[i + 1]), r1 = ptx::pack_bf16(d[i + 2], d[i + 3]);
      const std::uint32_t r2 = ptx::pack_bf16(d[i + 4], d[i + 5]), r3 = ptx::pack_bf16(d[i + 6], d[i + 7]);
      const int in_a = 16 * warp + matrix % 2 * 8, in_b = 16 * pair + matrix / 2 * 8;
      if constexpr (kTransposed) {
        ptx::stmatrix_x4_transposed(swizzled(buffer, in_b + in_matrix, in_a / 8), r0, r1, r2, r3);
      } else {
        ptx::stmatrix_x4(swizzled(buffer, in_a + in_matrix, in_b / 8), r0, r1, r2, r3);
      }
    }
  }

  /// Stages a round of 64 a × 32 b sums as float32, in boxes of 32 × 32.
  template <int kRound>
  __device__ static void stage_gradient(const float (&d)[128], std::byte* buffer) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
#pragma unroll
    for (int block = 0; block < 4; ++block) {  // blocks of 8 b
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // halves of a warp's 16 a
        const int i = 4 * (4 * kRound + block) + 2 * half;
        const int in_a = 16 * warp + 8 * half + lane / 4, in_b = 8 * block + lane % 4 * 2;
        if constexpr (kTransposed) {
          std::byte* box = buffer + in_a / kGradientBox * (kRoundBytes / 2) + in_a % 4 * 4;
          const int chunk = in_a % kGradientBox / 4;
          *reinterpret_cast<float*>(swizzled(box, in_b, chunk)) = d[i];
          *reinterpret_cast<float*>(swizzled(box, in_b + 1, chunk)) = d[i + 1];
        } else {
          *reinterpret_cast<float2*>(swizzled(buffer, in_a, in_b / 4) + in_b % 4 * 4) = float2{d[i], d[i + 1]};
        }
      }
    }
  }

  __device__ static void store_output(const CUtensorMap* map, const std::byte* buffer, OutputBlock to, const Work& work,
                                      const Params& p) {
    const int num_columns = columns(p);
    if (to.row >= work.row_end || to.column >= num_columns) return;
    if (to.row + kOutputBox <= work.row_end) {
      if (threadIdx.x % kWarpgroup == 0) ptx::tma_store_2d(map, buffer, to.column, to.row);
      return;
    }
    constexpr int kPerRow = kSwizzledRow / 16;
    for (int i = threadIdx.x % kWarpgroup; i < kOutputBox * kPerRow; i += kWarpgroup) {
      const int row = i / kPerRow, chunk = i % kPerRow, column = to.column + chunk * 8;
      if (to.row + row < work.row_end && column < num_columns) {
        const std::byte* from = swizzled(const_cast<std::byte*>(buffer), row, chunk);
        __nv_bfloat16* out = p.output + std::int64_t{to.row + row} * num_columns + column;
        *reinterpret_cast<uint4*>(out) = *reinterpret_cast<const uint4*>(from);
      }
    }
  }

  __device__ static void store_gradient(const CUtensorMap* map, const std::byte* buffer, OutputBlock to,
                                        const Work& work, const Params& p) {
    if (threadIdx.x % kWarpgroup != 0) return;
#pragma unroll
    for (int box = 0; box < 2; ++box) {
      const int row = to.row + (kTransposed ? 0 : box * kGradientBox);
      const int column = to.column + (kTransposed ? box * kGradientBox : 0);
      if (row >= p.m || column >= p.n) continue;
      const std::byte* from = buffer + box * (kRoundBytes / 2);
      if (p.accumulate || !work.is_last_part) {
        ptx::tma_reduce_add_3d(map, from, column, row, work.expert);
      } else {
        ptx::tma_store_3d(map, from, column, row, work.expert);
      }
    }
  }

  template <int kRound>
  __device__ static void write_round(const CUtensorMap* map, const float (&d)[128], std::byte* buffer, int warpgroup,
                                     const Work& work, const Params& p) {
    constexpr int kRoundB = kWgrad ? kGradientBox : kOutputBox;
    const int a = work.a + warpgroup * (kTileA / kConsumers), b = work.b + kRound * kRoundB;
    const OutputBlock to = kTransposed ? OutputBlock{b, a} : OutputBlock{a, b};
    // Buffers are used in turn, so all stores but the last kRoundBuffers - 1 must have been read.
    if (threadIdx.x % kWarpgroup == 0) ptx::tma_store_wait_read<kRoundBuffers - 1>();
    ptx::named_barrier_sync(1 + warpgroup, kWarpgroup);
    if constexpr (kWgrad) {
      stage_gradient<kRound>(d, buffer);
    } else {
      stage_output<kRound>(d, buffer);
    }
    ptx::fence_proxy_async_shared();
    ptx::named_barrier_sync(1 + warpgroup, kWarpgroup);
    if constexpr (kWgrad) {
      store_gradient(map, buffer, to, work, p);
    } else {
      store_output(map, buffer, to, work, p);
    }
    if (threadIdx.x % kWarpgroup == 0) ptx::tma_store_commit();
  }

  template <int... kRounds>
  __device__ static void write(std::integer_sequence<int, kRounds...>, const CUtensorMap* map, const float (&d)[128],
                               std::byte (*buffers)[kRoundBytes], int& next, int warpgroup, const Work& work,
                               const Params& p) {
    ((write_round<kRounds>(map, d, buffers[next], warpgroup, work, p), next = next + 1 < kRoundBuffers ? next + 1 : 0),
     ...);
  }

  __device__ static void consume(const CUtensorMap& map_out, const Params& p, Shared& shared) {
    const int warpgroup = ptx::warpgroup_idx() - 1;
    constexpr int kRounds = kWgrad ? kTileB / kGradientBox : kTileB / kOutputBox;
    auto work_list = schedule(p, shared.groups);
    Work work;
    auto at = shared.ring.begin_consumer();
    int next_round = 0;
    bool starting = true;
    while (work_list.next(work)) {
      // The second warpgroup starts kLead steps late and stays late. While one warpgroup writes, the other has the
      // tensor cores.
      if (starting && warpgroup == 1) {
        ptx::named_barrier_sync(kStartBarrier, kConsumerThreads);
        starting = false;
      }
      float d[128];
      for (int step = 0; step < work.k_count; ++step, at.advance()) {
        shared.ring.wait_full(at);
        if constexpr (kWgrad) {
          const int num_valid = work.row_end - work.row_begin - (work.k_begin + step) * kStepK;
          if (num_valid < kStepK) mask_rows(shared.stages[at.stage], warpgroup, num_valid);
        }
        multiply(d, shared.stages[at.stage], warpgroup, step > 0);
        if (step > 0) {
          ptx::wgmma_wait<1>();
          shared.ring.release(at.stage_before());
        }
        if (starting && (step == kLead || step == work.k_count - 1)) {
          ptx::named_barrier_arrive(kStartBarrier, kConsumerThreads);
          starting = false;
        }
      }
      ptx::wgmma_wait<0>();
      ptx::wgmma_touch(d);
      shared.ring.release(at.stage_before());
      if (!work.store) continue;
      if constexpr (kWgrad) {
        const PartTurn turn(p.parts_done, work_list.share(), warpgroup);
        const bool writer = threadIdx.x % kWarpgroup == 0;
        if (!work.is_last_part && writer) {
          turn.await(work);
          // This orders TMA's additions after the acquire.
          ptx::fence_proxy_async();
        }
        write(std::make_integer_sequence<int, kRounds>{}, &map_out, d, shared.rounds[warpgroup], next_round, warpgroup,
              work, p);
        if (!work.is_first_part && writer) {
          ptx::tma_store_wait<0>();
          // TMA's writes are complete. This orders them before the release.
          ptx::fence_proxy_async();
          turn.pass(work);
        }
      } else {
        write(std::make_integer_sequence<int, kRounds>{}, &map_out, d, shared.rounds[warpgroup], next_round, warpgroup,
              work, p);
      }
    }
    if (threadIdx.x % kWarpgroup == 0) ptx::tma_store_wait<0>();
  }

  __device__ static void run(const CUtensorMap& map_a, const CUtensorMap& map_b, const CUtensorMap& map_out,
                             const Params& p, Shared& shared) {
    const auto load = [&] {
      if constexpr (kWgrad) {
        WgradSchedule<kStepK>::load(shared.groups, p.offsets_E1, p.num_experts);
      } else {
        RowSchedule<kTransposed, kStepK>::load(shared.groups, p.offsets_E1, p.num_experts, columns(p));
      }
    };
    const auto produce_alone = [&] {
      if (threadIdx.x == 0) produce(map_a, map_b, p, shared);
    };
    run_block<kProducerRegisters, kConsumerRegisters>(shared.ring, 1, load, produce_alone,
                                                      [&] { consume(map_out, p, shared); });
  }
};

template <Product kProduct, bool kTransposed>
__global__ void __launch_bounds__(kThreads, 1) __cluster_dims__(kCluster, 1, 1)
    grouped_gemm(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
                 const __grid_constant__ CUtensorMap map_out, const __grid_constant__ Params params) {
  if constexpr (ptx::kIsSm90a) {
    extern __shared__ __align__(1024) std::byte shared[];
    Kernel<kProduct, kTransposed>::run(map_a, map_b, map_out, params, *reinterpret_cast<Shared<kProduct>*>(shared));
  } else {
    ptx::trap_on_other_architecture("grouped_gemm");
  }
}

}  // namespace tessera::cuda::sm90
