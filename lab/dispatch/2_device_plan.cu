// Level 2: the device plans, and no host is in the way.
//
// The idea. Counts and places are computed where the choices are. A warp per expert walks the rank's choices, numbers
// those of its expert with ballots, and stores their count into the window of every rank. After that every rank knows
// all counts, and computes the same placement. The numbers follow the order of the tokens, so all runs give the same
// bits. Counting with atomics would be shorter, and its order would change from run to run.
//
// What must be spent. The rows are those of level 1: 411 MB per rank over NVLink (0.91 ms), 4.23 GB of one GPU's
// memory (0.88 ms). To plan, 2048 warps read 128 KiB of choices each, 268 MB from the L2 cache: about 50 µs.
//
// What limits it. Memory. Copies on an H200 reach 85 to 90 % of its peak. Each kernel waits for the end of the one
// before, and on several GPUs for the counts of all.
//
// Predicted: 1.1 ms, 3.8 TB/s.
#include "level.cuh"

namespace lab {
namespace {

/// Gives a warp to each expert.
__global__ void __launch_bounds__(kThreads) count_slots(const __grid_constant__ Ranks ranks) {
  const Sizes& sizes = ranks.sizes;
  const int p = static_cast<int>(blockIdx.y), expert = warp_in_grid();
  if (expert >= sizes.experts) return;
  const int count = number_slots(ranks.of[p].expert_ids_tK, sizes.slots(), expert, ranks.of[p].index_tK);
  if (lane_idx() < sizes.ranks) {
    ranks.of[lane_idx()].window.counts_2PE[p * sizes.experts + expert] = count;
  }
}

/// Gives a block to each rank.
__global__ void __launch_bounds__(kThreads) place(const __grid_constant__ Ranks ranks) {
  const Sizes& sizes = ranks.sizes;
  const int p = static_cast<int>(blockIdx.y);
  const Rank& me = ranks.of[p];
  for (int x = static_cast<int>(threadIdx.x); x < sizes.experts; x += kThreads) {
    me.base_E[x] = first_row(me.window.counts_2PE, sizes, p, x);
    if (x <= sizes.experts_per_rank()) me.offsets_e1[x] = offset_of(me.window.counts_2PE, sizes, p, x);
  }
  if (threadIdx.x == 0) {
    me.offsets_e1[sizes.experts_per_rank()] = offset_of(me.window.counts_2PE, sizes, p, sizes.experts_per_rank());
  }
}

/// Gives a warp to each slot.
__global__ void __launch_bounds__(kThreads) send_slots(const __grid_constant__ Ranks ranks) {
  const Sizes& sizes = ranks.sizes;
  const Rank& me = ranks.of[blockIdx.y];
  const int slot = warp_in_grid();
  if (slot >= sizes.slots() || me.expert_ids_tK[slot] < 0) return;
  const int expert = me.expert_ids_tK[slot], units = sizes.row_units;
  const std::int64_t row = me.base_E[expert] + me.index_tK[slot];
  const uint4* from = me.x_tD + std::int64_t{slot / sizes.top_k} * units;
  copy_row(from, units, 1, ranks.of[sizes.rank_of(expert)].window.rows + row * units);
}

}  // namespace

void plan_on_device(const Ranks& ranks, cudaStream_t stream) {
  count_slots<<<warp_grid(ranks, ranks.sizes.experts), kThreads, 0, stream>>>(ranks);
  place<<<dim3(1, ranks.sizes.ranks), kThreads, 0, stream>>>(ranks);
}

void dispatch_2_device_plan(const Ranks& ranks, cudaStream_t stream) {
  plan_on_device(ranks, stream);
  send_slots<<<warp_grid(ranks, ranks.sizes.slots()), kThreads, 0, stream>>>(ranks);
}

}  // namespace lab
