// Level 1: the host plans, and every choice of a token is a row that crosses.
//
// The idea. The host reads all choices and sorts them by expert: it counts, adds the counts up to first rows, and gives
// each choice its row. It sends the plan to the GPU. There a warp per choice copies the token's row to the expert's
// rank.
//
// What must be spent. A rank has 32,768 choices at the shape, and 7/8 of them are remote: 28,672 rows of 14,336 bytes,
// 411 MB. NVLink needs 0.91 ms for them at 450 GB/s in each direction. On one GPU the rows of all 8 ranks are read
// once (0.47 GB, neighbouring warps share them in the caches) and written (3.76 GB): 0.88 ms at 4.8 TB/s.
//
// What limits it. The way over the host: 1 MB of choices to it, the plan, 1 MB of rows back, and the GPU idles
// meanwhile. The host here plans for all 8 ranks, some 3 ms. On 8 hosts each would plan for one, but they would wait
// for each other's counts. And the host can't be part of a CUDA graph.
//
// Predicted: 4.5 ms: 3 ms of plan, 0.4 ms of transfers, 1.1 ms of copying. That is 0.9 TB/s.
#include <vector>

#include "device/cuda_check.h"
#include "level.cuh"

namespace lab {
namespace {

/// Gives a warp to each slot.
__global__ void __launch_bounds__(kThreads) send_slots(const __grid_constant__ Ranks ranks) {
  const Sizes& sizes = ranks.sizes;
  const Rank& me = ranks.of[blockIdx.y];
  const int slot = warp_in_grid();
  if (slot >= sizes.slots() || me.expert_ids_tK[slot] < 0) return;
  const int rank = sizes.rank_of(me.expert_ids_tK[slot]), units = sizes.row_units;
  const uint4* from = me.x_tD + std::int64_t{slot / sizes.top_k} * units;
  copy_row(from, units, 1, ranks.of[rank].window.rows + std::int64_t{me.row_tK[slot]} * units);
}

using Ints = std::vector<std::int32_t>;

/// Sorts one rank's slots by expert: each slot takes the next of its expert's rows.
Ints rows_of_slots(const Ints& expert_ids_tK, const Ints& counts_PE, const Sizes& sizes, int p) {
  Ints next_row_E(sizes.experts), row_tK(expert_ids_tK.size(), -1);
  for (int x = 0; x < sizes.experts; ++x) next_row_E[x] = first_row(counts_PE.data(), sizes, p, x);
  for (std::size_t slot = 0; slot < expert_ids_tK.size(); ++slot) {
    if (expert_ids_tK[slot] >= 0) row_tK[slot] = next_row_E[expert_ids_tK[slot]]++;
  }
  return row_tK;
}

}  // namespace

void dispatch_1_row_per_expert(const Ranks& ranks, cudaStream_t stream) {
  const Sizes& sizes = ranks.sizes;
  std::vector<Ints> expert_ids(sizes.ranks, Ints(sizes.slots()));
  const std::size_t num_bytes = sizes.slots() * sizeof(std::int32_t);
  for (int p = 0; p < sizes.ranks; ++p) {
    TESSERA_CUDA(
        cudaMemcpyAsync(expert_ids[p].data(), ranks.of[p].expert_ids_tK, num_bytes, cudaMemcpyDeviceToHost, stream));
  }
  TESSERA_CUDA(cudaStreamSynchronize(stream));
  Ints counts_PE(sizes.ranks * sizes.experts);
  for (int p = 0; p < sizes.ranks; ++p) {
    for (const int expert : expert_ids[p]) {
      if (expert >= 0) ++counts_PE[p * sizes.experts + expert];
    }
  }
  for (int p = 0; p < sizes.ranks; ++p) {
    const Ints row_tK = rows_of_slots(expert_ids[p], counts_PE, sizes, p);
    Ints offsets_e1(sizes.experts_per_rank() + 1);
    for (int i = 0; i <= sizes.experts_per_rank(); ++i) offsets_e1[i] = offset_of(counts_PE.data(), sizes, p, i);
    // From pageable memory, these copies return when the vectors have been read.
    TESSERA_CUDA(cudaMemcpyAsync(ranks.of[p].row_tK, row_tK.data(), num_bytes, cudaMemcpyHostToDevice, stream));
    TESSERA_CUDA(cudaMemcpyAsync(ranks.of[p].offsets_e1, offsets_e1.data(), offsets_e1.size() * sizeof(std::int32_t),
                                 cudaMemcpyHostToDevice, stream));
  }
  send_slots<<<warp_grid(ranks, sizes.slots()), kThreads, 0, stream>>>(ranks);
}

}  // namespace lab
