// What the levels of the course share: ranks that are regions of one GPU's memory, and how a warp copies rows.
//
// Each level brings every token's row to the ranks of its experts, one row per choice (plan.cuh), and writes where each
// expert's rows begin. A rank reads and writes its own memory, and stores into the windows of other ranks. It reads
// nothing of theirs. On several GPUs a window is memory that the others have mapped. Here block (b, p) of a kernel
// belongs to rank p, and all windows lie in one GPU's memory.
// Predictions are for 8 ranks with 4096 tokens each, 256 experts, top-8 and rows of 14,336 bytes (7168 bfloat16), at
// uniform random routing ("the shape"), on an H200. A token then has 8 choices on 5.29 ranks, 7/8 of them remote.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "plan.cuh"

namespace lab {

inline constexpr int kMaxRanks = 8, kMaxTopK = 32, kWarp = 32, kMaxChunks = 8;
inline constexpr unsigned kAllLanes = 0xffffffff;

/// The memory of a rank into which all ranks store.
struct Window {
  uint4* rows = nullptr;               // [max_rows, row_units]
  std::int32_t* record_PtK = nullptr;  // where a source's choices have their rows here; -1: not here (levels 3 and 4)
  std::int32_t* counts_2PE = nullptr;  // one set of counts_PE; level 4 uses two by turns
  std::uint64_t *counted_P = nullptr, *stored_P = nullptr;  // flags of level 4, one per source
};

/// The state of a rank that lasts from call to call of level 4. All are 0 at first.
struct State {
  std::uint64_t epoch;  // calls made
  unsigned num_counted, num_finished, arrivals[kMaxChunks];
};

struct Rank {
  // Input.
  const uint4* x_tD = nullptr;
  const std::int32_t* expert_ids_tK = nullptr;
  // Output, beside the rows in the window.
  std::int32_t* offsets_e1 = nullptr;
  // Scratch memory of its own.
  std::int32_t* index_tK = nullptr;  // of a slot among those of this rank to the same expert
  std::int32_t* base_E = nullptr;    // from a slot's index to its row on the expert's rank (levels 2 and 3)
  std::int32_t* row_tK = nullptr;    // of a slot on its expert's rank (level 1)
  State* state = nullptr;
  Window window;
};

struct Ranks {
  Sizes sizes;
  Rank of[kMaxRanks];
};

void dispatch_1_row_per_expert(const Ranks& ranks, cudaStream_t stream);
void dispatch_2_device_plan(const Ranks& ranks, cudaStream_t stream);
void dispatch_3_row_per_rank(const Ranks& ranks, cudaStream_t stream);
void dispatch_4_one_kernel(const Ranks& ranks, cudaStream_t stream);

inline constexpr int kThreads = 256;

/// Returns a grid for kernels that give a warp to each of `count` things of every rank.
inline dim3 warp_grid(const Ranks& ranks, int count) {
  constexpr int kWarps = kThreads / kWarp;
  return dim3((count + kWarps - 1) / kWarps, ranks.sizes.ranks);
}
__device__ inline int lane_idx() { return static_cast<int>(threadIdx.x) % kWarp; }
__device__ inline int lowest(unsigned lanes) { return __ffs(static_cast<int>(lanes)) - 1; }
/// Returns the address that `lane` has. The whole warp executes it.
__device__ inline uint4* address_of(uint4* address, int lane) {
  return reinterpret_cast<uint4*>(__shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(address), lane));
}
__device__ inline int warp_in_grid() { return static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / kWarp); }

/// Copies a row of `units` to the targets that `lanes` have in `to`. The row is read once. A warp executes it.
__device__ inline void copy_row(const uint4* from, int units, unsigned lanes, uint4* to) {
  constexpr int kHeld = 4;  // units per lane in flight
  for (int first = 0; first < units; first += kHeld * kWarp) {
    const int begin = first + lane_idx();
    uint4 held[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (begin + i * kWarp < units) held[i] = from[begin + i * kWarp];
    }
    for (unsigned rest = lanes; rest != 0; rest &= rest - 1) {
      uint4* target = address_of(to, lowest(rest));
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        if (begin + i * kWarp < units) target[begin + i * kWarp] = held[i];
      }
    }
  }
}

// --- What levels 3 and 4 do with a token -----------------------------------------------------------------------------

/// Sends token t of rank p once to each rank that has one of its experts, and tells every rank where the token's
/// choices have their rows there. base_E has the first rows of this rank's slots per expert. A warp executes it.
__device__ inline void send_token(const Ranks& ranks, int p, int t, const std::int32_t* base_E) {
  const Sizes& sizes = ranks.sizes;
  const Rank& me = ranks.of[p];
  const int k = lane_idx(), slot = t * sizes.top_k + k;
  const bool has_choice = k < sizes.top_k && me.expert_ids_tK[slot] >= 0;
  const int expert = has_choice ? me.expert_ids_tK[slot] : 0;
  const int rank = has_choice ? sizes.rank_of(expert) : -1, row = has_choice ? base_E[expert] + me.index_tK[slot] : -1;
  if (k < sizes.top_k) {
    for (int peer = 0; peer < sizes.ranks; ++peer) {
      ranks.of[peer].window.record_PtK[p * sizes.slots() + slot] = rank == peer ? row : -1;
    }
  }
  const bool leads = has_choice && crosses(me.expert_ids_tK + t * sizes.top_k, sizes, k);
  uint4* to = leads ? ranks.of[rank].window.rows + std::int64_t{row} * sizes.row_units : nullptr;
  copy_row(me.x_tD + std::int64_t{t} * sizes.row_units, sizes.row_units, __ballot_sync(kAllLanes, leads), to);
}

/// Copies the row that token t of `source` has on this rank to its other rows here. A warp executes it.
__device__ inline void receive_token(const Window& window, const Sizes& sizes, int source, int t) {
  const int k = lane_idx();
  const int row = k < sizes.top_k ? window.record_PtK[(source * sizes.tokens + t) * sizes.top_k + k] : -1;
  const unsigned here = __ballot_sync(kAllLanes, row >= 0);
  if (here == 0) return;
  const int arrived = __shfl_sync(kAllLanes, row, lowest(here));  // the row to which the sender has stored
  const auto at = [&](int of) { return window.rows + std::int64_t{of} * sizes.row_units; };
  copy_row(at(arrived), sizes.row_units, here & (here - 1), row >= 0 ? at(row) : nullptr);
}

// --- The plan on the device (levels 2 to 4) --------------------------------------------------------------------------

/// Numbers the slots with this expert in their order, and returns how many there are. A warp executes it.
__device__ inline int number_slots(const std::int32_t* expert_ids_tK, int slots, int expert, std::int32_t* index_tK) {
  constexpr int kAtOnce = 8;  // loads per lane in flight
  int count = 0;
  for (int first = 0; first < slots; first += kAtOnce * kWarp) {
    int ids[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int slot = first + i * kWarp + lane_idx();
      ids[i] = slot < slots ? expert_ids_tK[slot] : -1;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const unsigned same = __ballot_sync(kAllLanes, ids[i] == expert);
      const unsigned before = same & ((1u << lane_idx()) - 1);
      if (ids[i] == expert) index_tK[first + i * kWarp + lane_idx()] = count + __popc(before);
      count += __popc(same);
    }
  }
  return count;
}

/// Fills in index_tK, base_E and offsets_e1 of all ranks, with two kernels. Level 2 defines it.
void plan_on_device(const Ranks& ranks, cudaStream_t stream);

}  // namespace lab
