// Dispatch and combine by stores into other GPUs' windows, in the steps of protocol.h.
//
// Some blocks of a call store, and the others process what arrives. Both go through the call's tokens in chunks. A
// chunk holds own tokens, or tokens of all ranks in a combine. When all storing warps have stored their parts of a
// chunk, the last one signals `stored` for it. The other blocks wait for that signal from all ranks and then read the
// chunk. The first block sends ready flags and counts before that. Storing never waits for reading, so no order of
// progress among blocks can deadlock. But the blocks of all ranks must be on their GPUs at the same time.
//
// An SM of a Hopper writes at most 32 bytes per cycle, wherever it writes to. About eight SMs fill the GPU's NVLink
// (docs/performance.md, "What bounds it"). So the number of storing blocks and that of the other blocks decide how long
// a call takes.
//
// A `ready` flag holds the call's epoch. A `stored` flag holds epoch · kMaxChunks + the number of a chunk. The last
// chunk of a call always has number kMaxChunks - 1. For visibility, a warp stores, executes fence.gpu and arrives. The
// last warp to arrive executes fence.sys and stores the flag with release.
#pragma once

#include "ep/direct/direct_kernels.h"
#include "ep/direct/direct_window.h"
#include "ops/kit/launch.cuh"
#include "ops/kit/ptx.cuh"

namespace tessera::ep {

using cuda::kAllLanes;
using cuda::kWarp;

inline constexpr int kThreads = 512, kWarps = kThreads / kWarp;
/// Stands in rank_tJ where there is no rank.
inline constexpr int kNoRank = -1;

__device__ inline int lane_idx() { return static_cast<int>(threadIdx.x) % kWarp; }
__device__ inline int lowest(unsigned lanes) { return __ffs(static_cast<int>(lanes)) - 1; }

/// Returns the address in another rank's window that corresponds to `place` in this rank's.
template <typename T>
__device__ inline T* at(const CallArgs& call, int rank, T* place) {
  return reinterpret_cast<T*>(call.peers[rank] + (reinterpret_cast<std::byte*>(place) - call.peers[call.rank]));
}

// --- Flags ---------------------------------------------------------------------------------------------------------

__device__ inline std::uint64_t* flag_word(const CallArgs& call, Flag flag, int source) {
  return reinterpret_cast<std::uint64_t*>(call.flags +
                                          (static_cast<int>(flag) * call.num_ranks + source) * sizeof(FlagWord));
}

__device__ inline std::uint64_t flag_value(const CallArgs& call, Flag flag, std::uint64_t epoch, int chunk) {
  return flag == Flag::kReady ? epoch
                              : epoch * kMaxChunks + static_cast<unsigned>(kMaxChunks - call.num_chunks + chunk);
}
__device__ inline std::uint64_t epoch_seen(Flag flag, std::uint64_t value) {
  return flag == Flag::kReady || value == 0 ? value : (value + 1) / kMaxChunks - 1;
}

/// Sets this rank's flag on every rank to `value`. One warp executes it.
__device__ inline void signal(const CallArgs& call, Flag flag, std::uint64_t value) {
  for (int peer = lane_idx(); peer < call.num_ranks; peer += kWarp) {
    ptx::store_release_sys(at(call, peer, flag_word(call, flag, call.rank)), value);
  }
}

__device__ inline bool has_failed(const CallArgs& call) {
  return *static_cast<volatile std::uint32_t*>(&call.state->failed);
}

/// Lets `fill` fill in the report, unless it holds an earlier failure.
template <typename Fill>
__device__ inline void report(const CallArgs& call, GpuReport::Kind kind, Fill&& fill) {
  volatile GpuReport& found = *call.report;
  if (found.kind != GpuReport::Kind::kNone) return;
  found.layer = call.layer;
  fill(found);
  __threadfence_system();
  found.kind = kind;
}

/// Waits until the flags of all sources have reached flag_value() of this epoch and chunk. One warp executes it.
/// Returns false if a flag does not come in time, or if an earlier wait has failed.
__device__ inline bool await(const CallArgs& call, Flag flag, std::uint64_t epoch, int chunk) {
  const std::uint64_t expected = flag_value(call, flag, epoch, chunk), begin = ptx::nanoseconds();
  bool came = true;
  for (int source = lane_idx(); source < call.num_ranks && came; source += kWarp) {
    const std::uint64_t* word = flag_word(call, flag, source);
    for (std::uint64_t seen = ptx::load_acquire_sys(word); seen < expected && came;
         seen = ptx::load_acquire_sys(word)) {
      came = !has_failed(call);
      if (came && ptx::nanoseconds() - begin > call.timeout_ns) {
        came = false;
        if (atomicExch(&call.state->failed, 1u) != 0) continue;
        report(call, GpuReport::Kind::kLate, [&](volatile GpuReport& late) {
          late.call = call.call;
          late.flag = flag;
          late.source = source;
          late.expected = epoch;
          late.seen = epoch_seen(flag, seen);
        });
      }
    }
  }
  const bool all_came = __all_sync(kAllLanes, came);
  // This orders memory, which a vote does not. All lanes may then read what one lane has acquired.
  __syncwarp();
  return all_came;
}

/// Holds how a call's blocks share its work: `sixteenths` of them store, and the others process what arrives.
struct WorkSplit {
  // num_senders blocks store. num_warps warps have this warp's role, and `warp` is this warp's index among them.
  int num_senders, num_warps, warp;
  bool sends;
  std::uint64_t epoch;
  int tokens_per_chunk;

  __device__ WorkSplit(const CallArgs& call, int sixteenths)
      : num_senders(max(1, call.num_blocks * sixteenths / 16)),
        sends(static_cast<int>(blockIdx.x) < num_senders),
        epoch(*static_cast<volatile std::uint64_t*>(&call.state->epoch) + 1),
        tokens_per_chunk((call.num_tokens + call.num_chunks - 1) / call.num_chunks) {
    // Warps with neighbouring indices are in different blocks.
    const int blocks = sends ? num_senders : call.num_blocks - num_senders;
    const int block = static_cast<int>(blockIdx.x) - (sends ? 0 : num_senders);
    num_warps = blocks * kWarps;
    warp = static_cast<int>(threadIdx.x) / kWarp * blocks + block;
  }
  __device__ int end_of(const CallArgs& call, int chunk) const {
    return min(call.num_tokens, (chunk + 1) * tokens_per_chunk);
  }
};

/// Counts this warp as one that has stored its part of a chunk. The last warp to arrive signals `stored` to all ranks.
__device__ inline void arrive(const CallArgs& call, const WorkSplit& split, int chunk) {
  bool is_last = false;
  __syncwarp();
  if (lane_idx() == 0) {
    // This makes the stores visible to the last warp to arrive, on this GPU. That warp then tells the other ranks.
    __threadfence();
    is_last = atomicAdd(&call.state->arrivals[chunk], 1u) == static_cast<unsigned>(split.num_warps) - 1;
    if (is_last) {
      call.state->arrivals[chunk] = 0;
      __threadfence_system();
    }
  }
  __syncwarp();
  if (__any_sync(kAllLanes, is_last)) {
    signal(call, Flag::kStored, flag_value(call, Flag::kStored, split.epoch, chunk));
  }
}

/// Ends this block's part of the call. Every block calls it when it is done. The last one counts the call as made.
__device__ inline void finish(const CallArgs& call, const WorkSplit& split, bool stored_sums) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence();
  if (atomicAdd(&call.state->num_finished, 1u) != gridDim.x - 1) return;
  call.state->num_finished = 0;
  call.state->epoch = split.epoch;
  call.state->after_sums = stored_sums;
}

/// Waits for the other ranks' ready flags if `needed`. Every thread of a block calls it. Returns false when the call
/// has failed and the block must exit.
__device__ inline bool get_ready(const CallArgs& call, const WorkSplit& split, bool needed) {
  __shared__ bool ready;
  if (threadIdx.x < kWarp) {
    bool goes_on = !__any_sync(kAllLanes, has_failed(call));
    if (needed && goes_on) {
      if (blockIdx.x == 0) {
        // This orders the counts that the block has stored before the flags.
        __threadfence_system();
        signal(call, Flag::kReady, split.epoch);
      }
      goes_on = await(call, Flag::kReady, split.epoch, 0);
    }
    if (threadIdx.x == 0) ready = goes_on;
  }
  __syncthreads();
  return ready;
}

// --- Pieces of rows ------------------------------------------------------------------------------------------------

// Rows are read through shared memory. Each warp has kStages pieces in flight, of the row or sum that it works on and
// of the next one.
constexpr int kPieceBytes = 4096, kUnitBytes = 16, kStages = 3;

struct PiecesMemory {
  std::byte pieces[kWarps][kStages][kPieceBytes];
  ptx::Barrier arrived[kWarps][kStages];
};

/// Copies pieces of rows into shared memory, and returns them in the order of the requests. One warp uses it.
class Pieces {
 public:
  __device__ explicit Pieces(PiecesMemory& memory) {
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    pieces_ = memory.pieces[warp];
    arrived_ = memory.arrived[warp];
    if (lane_idx() < kStages) ptx::mbarrier_init(&arrived_[lane_idx()], 1);
    ptx::fence_mbarrier_init();
    __syncwarp();
  }

  __device__ bool has_room() const { return num_held_ < kStages; }
  /// Starts to copy up to kPieceBytes. All lanes pass the same values.
  __device__ void fetch(const std::byte* from, int num_bytes) {
    if (lane_idx() == 0) {
      ptx::mbarrier_arrive_expect_tx(&arrived_[fetched_], static_cast<std::uint32_t>(num_bytes));
      ptx::bulk_load(pieces_[fetched_], from, static_cast<std::uint32_t>(num_bytes), &arrived_[fetched_]);
    }
    fetched_ = next_stage(fetched_);
    ++num_held_;
  }
  /// Waits for the next piece and returns it.
  __device__ const std::byte* wait() {
    const std::byte* piece = pieces_[awaited_];
    ptx::mbarrier_wait(&arrived_[awaited_], parity_);
    awaited_ = next_stage(awaited_);
    if (awaited_ == 0) parity_ ^= 1;
    return piece;
  }
  /// Frees the oldest piece. All lanes must have read it.
  __device__ void release() { --num_held_; }

 private:
  __device__ static int next_stage(int stage) { return stage + 1 == kStages ? 0 : stage + 1; }

  std::byte (*pieces_)[kPieceBytes];
  ptx::Barrier* arrived_;
  int num_held_ = 0;               // requested and not released
  int fetched_ = 0, awaited_ = 0;  // stages of the next pieces
  std::uint32_t parity_ = 0;
};

template <typename Args>
void launch(const cuda::Stream& stream, void (*kernel)(CallArgs, Args), const CallArgs& call, const Args& args) {
  TESSERA_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(PiecesMemory)));
  kernel<<<static_cast<unsigned>(call.num_blocks), kThreads, sizeof(PiecesMemory), stream.handle()>>>(call, args);
  TESSERA_CUDA(cudaGetLastError());
}

}  // namespace tessera::ep
