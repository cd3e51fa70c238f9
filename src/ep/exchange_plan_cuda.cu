#include <cub/block/block_scan.cuh>

#include "ep/exchange_plan.h"
#include "ops/kit/launch.cuh"
#include "ops/routing/permute.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;
/// Blocks that look at all experts have a thread for each.
constexpr int kMaxExperts = 1024;
using Scan = cub::BlockScan<int, kMaxExperts>;

__device__ int cut(int row, int room) { return min(max(row, 0), room); }

/// Runs in one block.
__global__ void __launch_bounds__(kMaxExperts)
    place_round_kernel(const std::int32_t* __restrict__ counts_PE, int num_ranks, int num_experts, int alignment,
                       int round, int room, std::int32_t* __restrict__ first_row_PE, std::int32_t* num_rounds_1) {
  __shared__ typename Scan::TempStorage memory;
  __shared__ int begins[kMaxExperts], num_rounds;
  const int x = static_cast<int>(threadIdx.x), local = num_experts / num_ranks;
  int total = 0;
  for (int source = 0; x < num_experts && source < num_ranks; ++source) total += counts_PE[source * num_experts + x];
  const int padded = (total + alignment - 1) / alignment * alignment;
  int begin = 0;  // of the expert's rows, where all ranks' rows lie one behind the other
  Scan(memory).ExclusiveSum(padded, begin);
  begins[x] = begin;
  if (x == 0) num_rounds = 1;
  __syncthreads();
  if (x < num_experts) {
    begin -= begins[x / local * local];
    if (x % local == local - 1) atomicMax(&num_rounds, (begin + padded + room - 1) / room);
    int row = begin - round * room;
    for (int source = 0; source < num_ranks; ++source) {
      first_row_PE[source * num_experts + x] = row;
      row += counts_PE[source * num_experts + x];
    }
  }
  __syncthreads();
  if (x == 0) *num_rounds_1 = num_rounds;
}

/// Counts the slots of a warp that have the expert. A warp has slots [begin, end), which are whole groups of 32 and a
/// rest.
__device__ int count_slots(const std::int32_t* ids, std::int64_t begin, std::int64_t end, int expert) {
  int count = 0;
  for (std::int64_t slot = begin + threadIdx.x % kWarp; slot < end; slot += kWarp) count += ids[slot] == expert;
  return __reduce_add_sync(kAllLanes, count);
}

/// Each block handles one expert. It replaces the id of the expert's choices that are not of the round by kNoExpert. If
/// all its choices are of the round, it has nothing to replace.
__global__ void __launch_bounds__(kThreads)
    keep_round_kernel(const std::int32_t* __restrict__ ids, std::int64_t num_slots, const std::int32_t* counts_E,
                      const std::int32_t* first_row_E, int room, std::int32_t* __restrict__ round_ids,
                      std::int32_t* kept_E) {
  __shared__ int counts[kWarps];
  const int expert = static_cast<int>(blockIdx.x), first_row = first_row_E[expert], count = counts_E[expert];
  const int kept = cut(first_row + count, room) - cut(first_row, room);
  if (threadIdx.x == 0) kept_E[expert] = kept;
  if (kept == count) return;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const std::int64_t per_warp = (num_slots + kThreads - 1) / kThreads * kWarp;
  const std::int64_t begin = warp * per_warp, end = min(num_slots, begin + per_warp);
  const int own = count_slots(ids, begin, end, expert);
  if (lane == 0) counts[warp] = own;
  __syncthreads();
  int row = first_row;
  for (int before = 0; before < warp; ++before) row += counts[before];
  for (std::int64_t group = begin; group < end; group += kWarp) {
    const std::int64_t slot = group + lane;
    const bool is_its = slot < end && ids[slot] == expert;
    const unsigned all = __ballot_sync(kAllLanes, is_its);
    const int mine = row + __popc(all & ((1u << lane) - 1));
    if (is_its && (mine < 0 || mine >= room)) round_ids[slot] = kNoExpert;
    row += __popc(all);
  }
}

struct ExchangeArgs {
  const std::int32_t *counts_PE, *first_row_PE;
  int num_ranks, num_experts, rank, alignment, room;
  std::int32_t *offsets_e1, *source_of_row_R, *row_of_received_R, *num_sent_P, *num_received_P;

  /// Returns the begin of the rows of the round that `source` sends to the expert, and their number.
  __device__ int2 rows_of(int source, int expert) const {
    const int at = source * num_experts + expert, begin = cut(first_row_PE[at], room);
    return {begin, cut(first_row_PE[at] + counts_PE[at], room) - begin};
  }
};

/// Assigns to sums_P the sums of each rank's sizes. `before` is the exclusive sum of the sizes, one per thread.
__device__ void sum_per_rank(const ExchangeArgs& args, const int* before, std::int32_t* sums_P) {
  const int local = args.num_experts / args.num_ranks, p = static_cast<int>(threadIdx.x);
  if (p < args.num_ranks) sums_P[p] = before[(p + 1) * local] - before[p * local];
}

/// Each block writes the entries for the rows that one source sends to one of this rank's experts. All blocks compute
/// where these are among the received rows. The first block also writes the outputs per rank and per expert.
__global__ void __launch_bounds__(kMaxExperts) plan_exchange_kernel(const ExchangeArgs args) {
  __shared__ typename Scan::TempStorage memory;
  __shared__ int before[kMaxExperts + 1];
  const int local = args.num_experts / args.num_ranks, first_expert = args.rank * local;
  const int thread = static_cast<int>(threadIdx.x);
  const auto scan = [&](int size) {
    int sum, all;
    Scan(memory).ExclusiveSum(size, sum, all);
    before[thread] = sum;
    if (thread == 0) before[kMaxExperts] = all;
    __syncthreads();
  };
  // The pairs of a source and an expert are in the order of the received rows.
  const auto rows_of_pair = [&](int pair) { return args.rows_of(pair / local, first_expert + pair % local); };
  scan(thread < args.num_experts ? rows_of_pair(thread).y : 0);
  const int2 own = rows_of_pair(static_cast<int>(blockIdx.x));
  const int first_received = before[blockIdx.x];
  for (int i = thread; i < own.y; i += kMaxExperts) {
    args.source_of_row_R[own.x + i] = first_received + i;
    args.row_of_received_R[first_received + i] = own.x + i;
  }
  if (blockIdx.x != 0) return;
  sum_per_rank(args, before, args.num_received_P);
  __syncthreads();
  scan(thread < args.num_experts ? args.rows_of(args.rank, thread).y : 0);
  sum_per_rank(args, before, args.num_sent_P);
  if (thread < local) args.offsets_e1[thread] = args.rows_of(0, first_expert + thread).x;
  if (thread == 0) {
    const int2 last = args.rows_of(args.num_ranks - 1, first_expert + local - 1);
    args.offsets_e1[local] = (last.x + last.y + args.alignment - 1) / args.alignment * args.alignment;
  }
}

int num_experts_of(const Tensor& counts_PE) {
  TESSERA_CHECK(counts_PE.dim(1) <= kMaxExperts, "{} experts", counts_PE.dim(1));
  return static_cast<int>(counts_PE.dim(1));
}

}  // namespace

void place_round(const Context& op, const Tensor& counts_PE, std::int64_t alignment, std::int64_t round,
                 std::int64_t room, const Tensor& first_row_PE, const Tensor& num_rounds_1) {
  const int num_experts = num_experts_of(counts_PE);
  if (op.measuring()) return;
  place_round_kernel<<<1, kMaxExperts, 0, stream_of(op)>>>(
      numbers<const std::int32_t>(counts_PE), static_cast<int>(counts_PE.dim(0)), num_experts,
      static_cast<int>(alignment), static_cast<int>(round), static_cast<int>(room), numbers<std::int32_t>(first_row_PE),
      numbers<std::int32_t>(num_rounds_1));
}

void keep_round(const Context& op, const Tensor& expert_ids_TK, const Tensor& counts_E, const Tensor& first_row_E,
                std::int64_t room, const Tensor& round_ids_TK, const Tensor& kept_E) {
  if (op.measuring()) return;
  copy_bytes(op.cuda->stream(), expert_ids_TK.raw(), expert_ids_TK.num_bytes(), round_ids_TK.raw());
  keep_round_kernel<<<static_cast<unsigned>(counts_E.dim(0)), kThreads, 0, stream_of(op)>>>(
      numbers<const std::int32_t>(expert_ids_TK), expert_ids_TK.num_elements(), numbers<const std::int32_t>(counts_E),
      numbers<const std::int32_t>(first_row_E), static_cast<int>(room), numbers<std::int32_t>(round_ids_TK),
      numbers<std::int32_t>(kept_E));
}

void plan_exchange(const Context& op, const Tensor& counts_PE, const Tensor& first_row_PE, std::int64_t rank,
                   std::int64_t alignment, const Tensor& offsets_e1, const Tensor& source_of_row_R,
                   const Tensor& row_of_received_R, const Tensor& num_sent_P, const Tensor& num_received_P) {
  const int num_experts = num_experts_of(counts_PE);
  if (op.measuring()) return;
  constexpr int kNone = 0xff;  // every byte of -1
  for (const Tensor& x_R : {source_of_row_R, row_of_received_R}) {
    TESSERA_CUDA(cudaMemsetAsync(x_R.raw(), kNone, x_R.num_bytes(), stream_of(op)));
  }
  plan_exchange_kernel<<<num_experts, kMaxExperts, 0, stream_of(op)>>>(
      {.counts_PE = numbers<const std::int32_t>(counts_PE),
       .first_row_PE = numbers<const std::int32_t>(first_row_PE),
       .num_ranks = static_cast<int>(counts_PE.dim(0)),
       .num_experts = num_experts,
       .rank = static_cast<int>(rank),
       .alignment = static_cast<int>(alignment),
       .room = static_cast<int>(source_of_row_R.dim(0)),
       .offsets_e1 = numbers<std::int32_t>(offsets_e1),
       .source_of_row_R = numbers<std::int32_t>(source_of_row_R),
       .row_of_received_R = numbers<std::int32_t>(row_of_received_R),
       .num_sent_P = numbers<std::int32_t>(num_sent_P),
       .num_received_P = numbers<std::int32_t>(num_received_P)});
}

}  // namespace tessera::cuda
