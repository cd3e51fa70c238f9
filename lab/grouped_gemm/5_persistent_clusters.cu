// Level 5: blocks that live as long as the launch, in clusters of two that share an operand.
//
// The idea. One block per SM walks a list of the tiles of all experts. The producer goes on to the next tile while the
// consumers still write the last one, so the ring is full again when they come back. Two blocks form a cluster and take
// two row tiles of the same columns. Each copies half of w's tile, and TMA writes it to both (multicast).
//
// What must be spent. 1024 cycles of tensor cores a step, as before. Copies: 16 KiB of x and half of 32 KiB of w for
// each SM, 4.8 GB in all instead of 7.2. A group's last pair of row tiles may be half empty: up to 128 rows per expert.
//
// What limits it. A tile no longer waits for its first copies, and there is no start of a block per tile. Both
// consumers still write at the same time, some 3000 cycles in which no WGMMA runs, and 8 % are padding. Multicast alone
// gains little: the kernel in src without it was within 1 %. A buffer is empty only when both blocks have read it, so
// the blocks of a cluster wait for each other.
//
// Predicted: 630 TFLOP/s. What src adds: one consumer runs two steps behind the other, so that one writes while the
// other multiplies; output by TMA; tiles of 256 × 128 where they pad less; bands of tiles that share the L2 cache.
#include "level.cuh"
#include "ops/gemm/sm90/sm90_launch.cuh"
#include "ops/gemm/sm90/sm90_ring.cuh"
#include "wgmma_tile.cuh"

namespace lab {
namespace {

using namespace tessera::cuda::sm90;

constexpr int kStages = 4, kProducerRegisters = 56, kConsumerRegisters = 224;
constexpr int kPairRows = kCluster * kTileRows, kShareOfW = kTileColumns / kCluster;

struct alignas(1024) Shared {
  OperandTiles stages[kStages];
  WarpBuffer out[kConsumerThreads / 32];
  Ring<kStages> ring;
};

__device__ TileList tiles_of(const Forward& p) {
  return TileList(p.offsets_E1, p.num_experts, p.m, kPairRows, kTileColumns, ptx::cluster_idx(), ptx::num_clusters());
}

__device__ void produce(const CUtensorMap& map_x, const CUtensorMap& map_w, const Forward& p, Shared& shared) {
  constexpr std::uint16_t kBoth = 0b11;
  const int rank = ptx::cluster_cta_rank(), steps = ceil_div(p.n, kStepK);
  TileList tiles = tiles_of(p);
  Tile tile;
  auto at = shared.ring.begin_producer();
  while (tiles.next(tile)) {
    for (int step = 0; step < steps; ++step, at.advance()) {
      OperandTiles& to = shared.stages[at.stage];
      ptx::Barrier* full = &shared.ring.full[at.stage];
      shared.ring.wait_empty(at);  // in both blocks
      // The partner's half of w counts, too: its copy completes on the barrier at this place of both blocks.
      ptx::mbarrier_arrive_expect_tx(full, sizeof(OperandTiles));
      ptx::tma_load_2d(to.x, &map_x, full, step * kStepK, tile.rows.row + rank * kTileRows);
      ptx::tma_load_3d_multicast(to.w + rank * kShareOfW * kOperandRowBytes, &map_w, full, kBoth, step * kStepK,
                                 tile.column + rank * kShareOfW, tile.rows.expert);
    }
  }
}

__device__ void consume(const Forward& p, Shared& shared) {
  const int rank = ptx::cluster_cta_rank(), steps = ceil_div(p.n, kStepK), warpgroup = ptx::warpgroup_idx() - 1;
  TileList tiles = tiles_of(p);
  Tile tile;
  auto at = shared.ring.begin_consumer();
  while (tiles.next(tile)) {
    float d[128];
    for (int step = 0; step < steps; ++step, at.advance()) {
      shared.ring.wait_full(at);
      multiply(d, shared.stages[at.stage], warpgroup, step > 0);
      if (step > 0) {
        ptx::wgmma_wait<1>();
        shared.ring.release(at.stage_before());
      }
    }
    ptx::wgmma_wait<0>();
    ptx::wgmma_touch(d);
    shared.ring.release(at.stage_before());
    // The second block of a group's last pair may have no rows. It has multiplied for its partner's sake only.
    tile.rows.row += rank * kTileRows;
    store_tile(d, p, tile.rows, tile.column, warpgroup, shared.out[threadIdx.x / 32 - kWarpgroup / 32]);
  }
}

__global__ void __launch_bounds__(kThreads, 1) __cluster_dims__(kCluster, 1, 1)
    persistent_clusters(const __grid_constant__ CUtensorMap map_x, const __grid_constant__ CUtensorMap map_w,
                        const __grid_constant__ Forward p) {
  if constexpr (ptx::kIsSm90a) {
    extern __shared__ __align__(1024) std::byte memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const auto produce_alone = [&] {
      if (threadIdx.x == 0) produce(map_x, map_w, p, shared);
    };
    run_block<kProducerRegisters, kConsumerRegisters>(
        shared.ring, 1, [] {}, produce_alone, [&] { consume(p, shared); });
  } else {
    ptx::trap_on_other_architecture("persistent_clusters");
  }
}

}  // namespace

void forward_5_persistent_clusters(const Forward& args, cudaStream_t stream) {
  const CUtensorMap x = operand_map(args.x_RN, 0, args.num_rows, args.n, kTileRows);
  const CUtensorMap w = operand_map(args.w_EMN, args.num_experts, args.m, args.n, kShareOfW);
  launch<persistent_clusters, Shared>(args.num_sms, stream, x, w, args);
}

}  // namespace lab
