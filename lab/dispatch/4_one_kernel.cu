// Level 4: counts, placement, stores and flags in one kernel.
//
// The idea. Ranks do not share a stream, so the end of a kernel on one says nothing to another. Flags in the windows
// say it: the writer stores, fences and stores the flag with release, and the reader waits with acquire loads. Then one
// kernel does all. 10 of 16 blocks send, and the others receive. Both go through the tokens in chunks, so receivers
// copy one chunk while the next one arrives. A flag holds the number of the call (the epoch) from the device's memory,
// so flags are never reset and the launch can be replayed as a part of a CUDA graph.
//
// `counted` of a call also says that its source has come to this call, and needs its window's old rows no more. Counts
// are stored before that, so they have two places, which calls use by turns. src/ep/direct/protocol.h has the argument.
//
// What must be spent. The bytes of level 3: 272 MB per rank over NVLink (0.60 ms), 5.5 GB of one GPU's memory (1.15
// ms).
//
// What limits it. All blocks of all ranks wait for each other, so all must be on the GPU at once: one per SM, with 16
// warps where level 3 has 40. A warp has 2 KiB in flight, an SM 32 KiB. An SM copies some 50 GB/s, so 80 senders need
// 0.6 ms for 2.49 GB and 48 receivers the same for 1.27 GB. Counting takes 50 µs, and the last chunk is copied alone.
//
// Predicted: 1.5 ms, 3.7 TB/s. What src adds: rows by bulk copies through shared memory, combine and the backward
// passes, payloads in 8 bits, room that may not suffice, and waits that report who is late.
#include <algorithm>

#include "device/cuda_check.h"
#include "flags.cuh"
#include "level.cuh"

namespace lab {
namespace {

constexpr int kBlockThreads = 512, kWarps = kBlockThreads / kWarp, kMaxExperts = 1024;
constexpr int kSenders = 10;  // of 16 blocks

__device__ int end_of_chunk(const Sizes& sizes, int chunk) {
  return min(sizes.tokens, (sizes.tokens + kMaxChunks - 1) / kMaxChunks * (chunk + 1));
}

/// Returns what `stored` holds when a chunk has been stored. Later chunks and later epochs have larger numbers.
__device__ std::uint64_t stored_value(std::uint64_t epoch, int chunk) { return epoch * kMaxChunks + chunk; }

/// Counts the rank's slots and tells all ranks. Returns all ranks' counts when they have come. The block executes it.
__device__ const std::int32_t* exchange_counts(const Ranks& ranks, int p, std::uint64_t epoch) {
  const Sizes& sizes = ranks.sizes;
  const Rank& me = ranks.of[p];
  const std::int64_t set = static_cast<int>(epoch % 2) * sizes.ranks * sizes.experts;
  for (int x = warp_in_grid(); x < sizes.experts; x += static_cast<int>(gridDim.x) * kWarps) {
    const int count = number_slots(me.expert_ids_tK, sizes.slots(), x, me.index_tK);
    if (lane_idx() < sizes.ranks) {
      ranks.of[lane_idx()].window.counts_2PE[set + p * sizes.experts + x] = count;
    }
  }
  if (is_last_to_arrive(&me.state->num_counted, gridDim.x * kWarps) && lane_idx() < sizes.ranks) {
    ptx::store_release_sys(ranks.of[lane_idx()].window.counted_P + p, epoch);
  }
  await(me.window.counted_P, sizes.ranks, epoch);
  __syncthreads();
  return me.window.counts_2PE + set;
}

__device__ void send(const Ranks& ranks, int p, int num_blocks, const std::int32_t* base_E, std::uint64_t epoch) {
  const int num_warps = num_blocks * kWarps;
  int t = warp_in_grid();
  for (int chunk = 0; chunk < kMaxChunks; ++chunk) {
    for (; t < end_of_chunk(ranks.sizes, chunk); t += num_warps) send_token(ranks, p, t, base_E);
    if (is_last_to_arrive(&ranks.of[p].state->arrivals[chunk], num_warps) && lane_idx() < ranks.sizes.ranks) {
      ptx::store_release_sys(ranks.of[lane_idx()].window.stored_P + p, stored_value(epoch, chunk));
    }
  }
}

__device__ void receive(const Ranks& ranks, int p, int first_block, std::uint64_t epoch) {
  const Sizes& sizes = ranks.sizes;
  const Window& window = ranks.of[p].window;
  const int num_warps = (static_cast<int>(gridDim.x) - first_block) * kWarps;
  int i = warp_in_grid() - first_block * kWarps, begin = 0;
  for (int chunk = 0; chunk < kMaxChunks; ++chunk) {
    await(window.stored_P, sizes.ranks, stored_value(epoch, chunk));
    const int end = end_of_chunk(sizes, chunk), count = (end - begin) * sizes.ranks;
    for (; i < count; i += num_warps) receive_token(window, sizes, i % sizes.ranks, begin + i / sizes.ranks);
    i -= count;  // the next chunk begins with the next warp
    begin = end;
  }
}

__global__ void __launch_bounds__(kBlockThreads) one_kernel(const __grid_constant__ Ranks ranks) {
  __shared__ std::int32_t base_E[kMaxExperts];
  const Sizes& sizes = ranks.sizes;
  const int p = static_cast<int>(blockIdx.y), thread = static_cast<int>(threadIdx.x);
  const Rank& me = ranks.of[p];
  const std::uint64_t epoch = me.state->epoch + 1;
  const std::int32_t* counts_PE = exchange_counts(ranks, p, epoch);
  for (int x = thread; x < sizes.experts; x += kBlockThreads) base_E[x] = first_row(counts_PE, sizes, p, x);
  if (blockIdx.x == 0) {
    for (int i = thread; i <= sizes.experts_per_rank(); i += kBlockThreads) {
      me.offsets_e1[i] = offset_of(counts_PE, sizes, p, i);
    }
  }
  __syncthreads();
  const int num_senders = max(1, static_cast<int>(gridDim.x) * kSenders / 16);
  if (static_cast<int>(blockIdx.x) < num_senders) {
    send(ranks, p, num_senders, base_E, epoch);
  } else {
    receive(ranks, p, num_senders, epoch);
  }
  __syncthreads();
  if (thread == 0 && atomicAdd(&me.state->num_finished, 1u) == gridDim.x - 1) {  // all blocks have read the epoch
    me.state->num_finished = 0;
    me.state->epoch = epoch;
  }
}

}  // namespace

void dispatch_4_one_kernel(const Ranks& ranks, cudaStream_t stream) {
  static const int num_sms = [] {
    int device = 0, count = 0;
    TESSERA_CUDA(cudaGetDevice(&device));
    TESSERA_CUDA(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
    return count;
  }();
  TESSERA_CHECK(ranks.sizes.experts <= kMaxExperts && num_sms >= 2 * ranks.sizes.ranks, "{} experts, {} ranks, {} SMs",
                ranks.sizes.experts, ranks.sizes.ranks, num_sms);
  one_kernel<<<dim3(num_sms / ranks.sizes.ranks, ranks.sizes.ranks), kBlockThreads, 0, stream>>>(ranks);
}

}  // namespace lab
