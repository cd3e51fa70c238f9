// Dispatch and combine by stores into other GPUs' windows, by the steps of protocol.h.
//
// Five of eight blocks of a call store, the others work on what comes. Both go through the call's tokens in chunks:
// when all warps that store have stored their part of a chunk of own tokens, and of other ranks' tokens in a
// combine, the last one signals `stored` for this chunk; the others wait for all ranks' signal of a chunk, then
// reads it. Ready flags and counts come before, in the first block. Storing never waits for reading, so no order in
// which blocks get on can hang; but every rank's blocks must be on its GPU at the same time.
//
// A flag holds the call's epoch; `stored` epoch · kMaxChunks + the chunk, counted so that the last one has the highest
// number. Visibility: a warp's stores, fence.sys, arrival; the last to arrive: fence.sys, release store of the flag.
#include "ep/direct_kernels.h"
#include "ep/direct_window.h"
#include "ops/cuda/launch.cuh"
#include "ops/cuda/ptx.cuh"

namespace tessera::ep {
namespace {

using cuda::from_float;
using cuda::get_lanes;
using cuda::kWarp;
using cuda::Lanes;
using cuda::to_float;

constexpr int kThreads = 512, kWarps = kThreads / kWarp;
constexpr unsigned kAllLanes = 0xffffffffu;
/// In rank_TJ: the token's layer was overloaded.
constexpr int kNoRank = -1, kOverloaded = -2;

__device__ int lane_idx() { return static_cast<int>(threadIdx.x) % kWarp; }
__device__ int lowest(unsigned lanes) { return __ffs(static_cast<int>(lanes)) - 1; }

/// What the own window's `place` is in another's.
template <typename T>
__device__ T* at(const CallArgs& call, int rank, T* place) {
  return reinterpret_cast<T*>(call.peers[rank] + (reinterpret_cast<std::byte*>(place) - call.peers[call.rank]));
}

// --- Flags ---------------------------------------------------------------------------------------------------------

__device__ std::uint64_t load_acquire(const std::byte* word) {
  std::uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}
__device__ void store_release(std::byte* word, std::uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
__device__ std::uint64_t nanoseconds() {
  std::uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

__device__ std::byte* flag_word(const CallArgs& call, Flag flag, int source) {
  return call.flags + (static_cast<int>(flag) * call.num_ranks + source) * sizeof(FlagWord);
}

__device__ std::uint64_t flag_value(const CallArgs& call, Flag flag, std::uint64_t epoch, int chunk) {
  return flag == Flag::kReady ? epoch
                              : epoch * kMaxChunks + static_cast<unsigned>(kMaxChunks - call.num_chunks + chunk);
}
__device__ std::uint64_t epoch_seen(Flag flag, std::uint64_t value) {
  return flag == Flag::kReady || value == 0 ? value : (value + 1) / kMaxChunks - 1;
}

/// A warp's.
__device__ void signal(const CallArgs& call, Flag flag, std::uint64_t value) {
  for (int peer = lane_idx(); peer < call.num_ranks; peer += kWarp) {
    store_release(at(call, peer, flag_word(call, flag, call.rank)), value);
  }
}

__device__ bool has_failed(const CallArgs& call) { return *static_cast<volatile std::uint32_t*>(&call.state->failed); }

/// Lets `fill` fill in the report if there is none.
template <typename Fill>
__device__ void report(const CallArgs& call, GpuReport::Kind kind, Fill&& fill) {
  volatile GpuReport& found = *call.report;
  if (found.kind != GpuReport::Kind::kNone) return;
  found.layer = call.layer;
  fill(found);
  __threadfence_system();
  found.kind = kind;
}

/// A warp's: until all sources' flags have this value. False if one does not come in time, or has not before.
__device__ bool await(const CallArgs& call, Flag flag, std::uint64_t epoch, int chunk) {
  const std::uint64_t expected = flag_value(call, flag, epoch, chunk), begin = nanoseconds();
  bool came = true;
  for (int source = lane_idx(); source < call.num_ranks && came; source += kWarp) {
    const std::byte* word = flag_word(call, flag, source);
    for (std::uint64_t seen = load_acquire(word); seen < expected && came; seen = load_acquire(word)) {
      came = !has_failed(call);
      if (came && nanoseconds() - begin > call.timeout_ns) {
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
  return __all_sync(kAllLanes, came);
}

/// This rank's share of a call in blocks.
struct Share {
  int num_senders, num_warps, warp;  // blocks that store; warps that do as this one does, this one
  bool sends;
  std::uint64_t epoch;
  int tokens_per_chunk;

  __device__ explicit Share(const CallArgs& call)
      : num_senders(max(1, call.num_blocks * 5 / 8)),
        sends(static_cast<int>(blockIdx.x) < num_senders),
        epoch(*static_cast<volatile std::uint64_t*>(&call.state->epoch) + 1),
        tokens_per_chunk((call.num_tokens + call.num_chunks - 1) / call.num_chunks) {
    // Neighbours are in different blocks.
    const int blocks = sends ? num_senders : call.num_blocks - num_senders;
    const int block = static_cast<int>(blockIdx.x) - (sends ? 0 : num_senders);
    num_warps = blocks * kWarps;
    warp = static_cast<int>(threadIdx.x) / kWarp * blocks + block;
  }
  __device__ int end_of(const CallArgs& call, int chunk) const {
    return min(call.num_tokens, (chunk + 1) * tokens_per_chunk);
  }
};

/// A warp's: has stored its part of a chunk.
__device__ void arrive(const CallArgs& call, const Share& share, int chunk) {
  bool is_last = false;
  __syncwarp();
  if (lane_idx() == 0) {
    __threadfence_system();
    is_last = atomicAdd(&call.state->arrivals[chunk], 1u) == static_cast<unsigned>(share.num_warps) - 1;
    if (is_last) call.state->arrivals[chunk] = 0;
    __threadfence_system();
  }
  __syncwarp();
  if (__any_sync(kAllLanes, is_last)) {
    signal(call, Flag::kStored, flag_value(call, Flag::kStored, share.epoch, chunk));
  }
}

/// The end of all blocks.
__device__ void finish(const CallArgs& call, const Share& share, bool stored_sums) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence();
  if (atomicAdd(&call.state->num_finished, 1u) != gridDim.x - 1) return;
  call.state->num_finished = 0;
  call.state->epoch = share.epoch;
  call.state->after_sums = stored_sums;
}

/// A block's; with ready flags if `needed`. False if it is not to go on.
__device__ bool get_ready(const CallArgs& call, const Share& share, bool needed) {
  __shared__ bool ready;
  if (threadIdx.x < kWarp) {
    bool goes_on = !__any_sync(kAllLanes, has_failed(call));
    if (needed && goes_on) {
      if (blockIdx.x == 0) {
        __threadfence_system();
        signal(call, Flag::kReady, share.epoch);
      }
      goes_on = await(call, Flag::kReady, share.epoch, 0);
    }
    if (threadIdx.x == 0) ready = goes_on;
  }
  __syncthreads();
  return ready;
}

// --- Rows ----------------------------------------------------------------------------------------------------------

/// A warp's: bytes to the addresses that `lanes` have in `to`.
template <typename Unit>
__device__ void copy_units(const std::byte* from, std::int64_t num_bytes, unsigned lanes, std::byte* to) {
  constexpr int kInFlight = 8;
  const int length = static_cast<int>(num_bytes / static_cast<std::int64_t>(sizeof(Unit)));
  const Unit* source = reinterpret_cast<const Unit*>(from);
  for (int begin = lane_idx(); begin - lane_idx() < length; begin += kWarp * kInFlight) {
    Unit units[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (begin + i * kWarp < length) units[i] = source[begin + i * kWarp];
    }
    for (unsigned rest = lanes; rest != 0; rest &= rest - 1) {
      Unit* target =
          reinterpret_cast<Unit*>(__shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(to), lowest(rest)));
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        if (begin + i * kWarp < length) target[begin + i * kWarp] = units[i];
      }
    }
  }
}

__device__ void copy_row(const RowPart& part, const std::byte* from, unsigned lanes, std::byte* to) {
  if (part.wide) {
    copy_units<uint4>(from, part.row_bytes, lanes, to);
  } else {
    copy_units<std::uint8_t>(from, part.row_bytes, lanes, to);
  }
}

struct Placement {
  std::int32_t total[kMaxGpuExperts];  // rows of an expert
  std::int32_t base[kMaxGpuExperts];   // what takes this rank's sorted slots to rows
  // Of the own experts' rows; the last end is of no use.
  std::int32_t offsets[kMaxGpuExperts + 1], ends[kMaxGpuExperts + 1];
  std::int32_t overloaded;
};

/// A block's: where rows go, from all ranks' counts (placement.h). Without a row anywhere if a rank gets too many.
__device__ void place(const CallArgs& call, const RowsArgs& args, Placement& placement) {
  const int num_ranks = call.num_ranks, local = args.num_local_experts;
  if (threadIdx.x == 0) placement.overloaded = num_ranks;
  for (int x = static_cast<int>(threadIdx.x); x < args.num_experts; x += kThreads) {
    std::int32_t before = 0, total = 0;
    for (int source = 0; source < num_ranks; ++source) {
      if (source == call.rank) before = total;
      total += args.counts_PE[source * args.num_experts + x];
    }
    placement.total[x] = total;
    placement.base[x] = before - args.sorted_offsets_E1[x];
  }
  __syncthreads();
  const int rank = static_cast<int>(threadIdx.x);
  std::int32_t row = 0, num_rows = 0;
  if (rank < num_ranks) {
    for (int i = 0; i < local; ++i) {
      const std::int32_t total = placement.total[rank * local + i];
      placement.base[rank * local + i] += row;
      if (rank == call.rank) {
        placement.offsets[i] = row;
        placement.ends[i] = row + total;
      }
      num_rows += total;
      row = (row + total + args.alignment - 1) / args.alignment * args.alignment;
    }
    if (rank == call.rank) placement.offsets[local] = row;
    if (row > args.max_rows) atomicMin(&placement.overloaded, rank);
  }
  __syncthreads();
  if (placement.overloaded == num_ranks) return;
  if (blockIdx.x == 0 && rank == placement.overloaded) {
    report(call, GpuReport::Kind::kOverload, [&](volatile GpuReport& overload) {
      overload.rank = rank;
      overload.num_rows = num_rows;
      overload.num_rows_needed = row;
    });
  }
  for (int i = static_cast<int>(threadIdx.x); i <= local; i += kThreads) placement.offsets[i] = placement.ends[i] = 0;
  __syncthreads();
}

/// A warp's, of a dispatch: where the copies of token t go, and their records. Each lane of the result has a copy's
/// rank and first row in `its_rank` and `its_row`.
__device__ unsigned send_records(const CallArgs& call, const RowsArgs& args, const Placement& placement, int t,
                                 int& its_rank, int& its_row) {
  const int lane = lane_idx(), top_k = call.top_k, max_ranks = call.max_ranks_of_token;
  const int slot = t * top_k + lane, token = call.rank * call.num_tokens + t;
  int rank = kNoRank, row = -1;
  float weight = 0.0f;
  if (lane < top_k) {
    const int expert = args.expert_ids_TK[slot];
    rank = expert / args.num_local_experts;
    row = placement.base[expert] + args.row_of_slot_TK[slot];
    weight = args.weights_TK[slot];
  }
  const unsigned same = __match_any_sync(kAllLanes, rank);
  const bool is_first = lane < top_k && lowest(same) == lane;
  const unsigned firsts = __ballot_sync(kAllLanes, is_first);
  int place = 0;
  for (unsigned rest = firsts; rest != 0; rest &= rest - 1) {
    place += __shfl_sync(kAllLanes, rank, lowest(rest)) < rank ? 1 : 0;
  }
  if (is_first) {
    call.rank_TJ[t * max_ranks + place] = rank;
    args.first_row_TJ[t * max_ranks + place] = row;
  }
  if (__popc(firsts) <= lane && lane < max_ranks) call.rank_TJ[t * max_ranks + lane] = kNoRank;
  for (int begin = 0; begin < call.num_ranks; begin += kWarp) {
    const int peer = begin + lane;
    int its_place = -1;
    for (unsigned rest = firsts; rest != 0; rest &= rest - 1) {
      const int copy_rank = __shfl_sync(kAllLanes, rank, lowest(rest));
      const int copy_place = __shfl_sync(kAllLanes, place, lowest(rest));
      if (copy_rank == peer) its_place = copy_place;
    }
    if (peer < call.num_ranks) at(call, peer, args.window_place_PT)[token] = its_place;
  }
  for (unsigned rest = firsts; rest != 0; rest &= rest - 1) {
    const int peer = __shfl_sync(kAllLanes, rank, lowest(rest));
    if (lane < top_k) at(call, peer, args.window_choice_PTK)[token * top_k + lane] = {rank == peer ? row : -1, weight};
  }
  its_rank = rank;
  its_row = row;
  return firsts;
}

/// A warp's: the copies of token t as a dispatch has decided. They begin with another one for each token, so that ranks
/// do not all store to the same one.
__device__ unsigned find_copies(const CallArgs& call, const RowsArgs& args, int t, int& its_rank, int& its_row) {
  const int lane = lane_idx(), max_ranks = call.max_ranks_of_token;
  int rank = kNoRank, row = -1;
  if (lane < max_ranks) {
    rank = call.rank_TJ[t * max_ranks + lane];
    row = args.first_row_TJ[t * max_ranks + lane];
  }
  const int num_copies = __popc(__ballot_sync(kAllLanes, rank >= 0));
  if (num_copies == 0) return 0;
  const int from = (lane + t + call.rank) % num_copies;
  its_rank = __shfl_sync(kAllLanes, rank, from);
  its_row = __shfl_sync(kAllLanes, row, from);
  return kAllLanes >> (kWarp - num_copies);
}

template <bool kDispatch>
__device__ void send_rows(const CallArgs& call, const RowsArgs& args, const Share& share, const Placement& placement) {
  const bool overloaded = kDispatch && placement.overloaded < call.num_ranks;
  int t = share.warp;
  for (int chunk = 0; chunk < call.num_chunks; ++chunk) {
    for (; t < share.end_of(call, chunk); t += share.num_warps) {
      if (overloaded) {
        for (int i = lane_idx(); i < call.max_ranks_of_token; i += kWarp) {
          call.rank_TJ[t * call.max_ranks_of_token + i] = kOverloaded;
        }
        continue;
      }
      int rank = 0, row = 0;
      const unsigned copies =
          kDispatch ? send_records(call, args, placement, t, rank, row) : find_copies(call, args, t, rank, row);
      const bool has_copy = (copies >> lane_idx() & 1) != 0;
      for (int i = 0; i < args.num_parts; ++i) {
        const RowPart& part = args.parts[i];
        std::byte* target = has_copy ? at(call, rank, part.window) + row * part.row_bytes : nullptr;
        copy_row(part, part.tokens + t * part.row_bytes, copies, target);
      }
    }
    arrive(call, share, chunk);
  }
}

/// Padding of the rows that are wanted.
__device__ void clear_padding(const RowsArgs& args, const Share& share, const Placement& placement) {
  for (int i = 0; i < args.num_local_experts; ++i) {
    for (int row = placement.ends[i] + share.warp; row < placement.offsets[i + 1]; row += share.num_warps) {
      for (int p = 0; p < args.num_parts; ++p) {
        const RowPart& part = args.parts[p];
        if (part.out == nullptr) continue;
        std::byte* out = part.out + row * part.row_bytes;
        for (std::int64_t at = lane_idx(); at < part.row_bytes; at += kWarp) out[at] = std::byte{0};
      }
    }
  }
}

/// As many tokens of a source at a time as a warp has lanes for their choices.
template <bool kDispatch>
__device__ void receive_rows(const CallArgs& call, const RowsArgs& args, const Share& share,
                             const Placement& placement) {
  const bool overloaded = kDispatch && placement.overloaded < call.num_ranks;
  const int lane = lane_idx(), top_k = call.top_k, at_once = kWarp / top_k;
  const int its_token = lane / top_k, k = lane % top_k;
  clear_padding(args, share, placement);
  for (int chunk = 0; chunk < call.num_chunks; ++chunk) {
    if (!await(call, Flag::kStored, share.epoch, chunk)) return;
    const int first = chunk * share.tokens_per_chunk, count = share.end_of(call, chunk) - first;
    const int groups = (max(count, 0) + at_once - 1) / at_once;
    for (int group = share.warp; group < groups * call.num_ranks; group += share.num_warps) {
      const int in_chunk = group / call.num_ranks * at_once + its_token;
      const int token = group % call.num_ranks * call.num_tokens + first + in_chunk;
      const bool has_token = its_token < at_once && in_chunk < count;
      GpuChoice choice{-1, 0.0f};
      int place = -1;
      if (has_token) {
        if constexpr (kDispatch) {
          place = overloaded ? -1 : args.window_place_PT[token];
          choice = args.window_choice_PTK[token * top_k + k];
          if (k == 0) call.place_PT[token] = place;
        } else {
          place = call.place_PT[token];
          choice.row = call.row_PTK[token * top_k + k];
        }
      }
      const bool is_here = place >= 0 && choice.row >= 0;
      const unsigned here = __ballot_sync(kAllLanes, is_here);
      const unsigned of_token = __match_any_sync(kAllLanes, its_token) & here;
      const int first_row = __shfl_sync(kAllLanes, choice.row, of_token == 0 ? lane : lowest(of_token));
      if constexpr (kDispatch) {
        if (place >= 0) call.row_PTK[token * top_k + k] = choice.row;
        if (is_here) {
          args.source_of_row_R[choice.row] = first_row;
          args.weights_R[choice.row] = choice.weight;
        }
      }
      for (int p = 0; p < args.num_parts; ++p) {
        const RowPart& part = args.parts[p];
        if (part.out == nullptr) continue;
        const std::byte* from = part.window + first_row * part.row_bytes;
        std::byte* to = part.out + choice.row * part.row_bytes;
        const unsigned wanted = __ballot_sync(kAllLanes, is_here && to != from);
        for (int i = 0; i < at_once; ++i) {
          const unsigned lanes = __shfl_sync(kAllLanes, of_token, i * top_k) & wanted;
          if (lanes == 0) continue;
          const auto* source = reinterpret_cast<const std::byte*>(
              __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(from), i * top_k));
          copy_row(part, source, lanes, to);
        }
      }
    }
  }
}

template <bool kDispatch>
__global__ void __launch_bounds__(kThreads)
    rows_kernel(const __grid_constant__ CallArgs call, const __grid_constant__ RowsArgs args) {
  __shared__ Placement placement;
  const Share share(call);
  if (kDispatch && blockIdx.x == 0) {
    for (int i = static_cast<int>(threadIdx.x); i < call.num_ranks * args.num_experts; i += kThreads) {
      const int peer = i / args.num_experts, x = i % args.num_experts;
      at(call, peer, args.counts_PE)[call.rank * args.num_experts + x] = args.counts_E[x];
    }
    __syncthreads();
  }
  const bool ready = get_ready(call, share, true);
  if (kDispatch && ready) place(call, args, placement);
  for (int i = static_cast<int>(threadIdx.x); i <= args.num_local_experts; i += kThreads) {
    if constexpr (kDispatch) {
      // Where nothing comes, the experts have nothing to do.
      if (blockIdx.x == 0) args.offsets_e1[i] = ready ? placement.offsets[i] : 0;
      if (blockIdx.x == 0 && i < args.num_local_experts) args.ends_e[i] = ready ? placement.ends[i] : 0;
    } else {
      placement.offsets[i] = args.offsets_e1[i];
      if (i < args.num_local_experts) placement.ends[i] = args.ends_e[i];
    }
  }
  __syncthreads();
  if (ready) {
    if (share.sends) {
      send_rows<kDispatch>(call, args, share, placement);
    } else {
      receive_rows<kDispatch>(call, args, share, placement);
    }
  }
  finish(call, share, false);
}

// --- Sums ----------------------------------------------------------------------------------------------------------

// What is read comes through shared memory: each warp has kStages pieces of rows on their way, of the sum that it makes
// and of the next.
constexpr int kPieceBytes = 4096, kUnitBytes = 16, kStages = 3;
constexpr int kUnits = kPieceBytes / kWarp / kUnitBytes;  // of a piece, per lane

struct WarpMemory {
  std::byte pieces[kStages][kPieceBytes];
};
struct SumsMemory {
  WarpMemory warps[kWarps];
  ptx::Barrier arrived[kWarps][kStages];
};

/// y = the sum of weight · row, over the lanes that have a row, in their order. No lanes: no sum.
struct Sum {
  unsigned lanes = 0;
  const std::byte* row = nullptr;
  float weight = 1.0f;
  std::byte* y = nullptr;
};

/// A warp's.
template <typename T>
class Summing {
 public:
  /// `first`: what sums begin with.
  __device__ Summing(SumsMemory& memory, int row_bytes, float first) : row_bytes_(row_bytes), first_(first) {
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    pieces_ = memory.warps[warp].pieces;
    arrived_ = memory.arrived[warp];
    if (lane_idx() < kStages) ptx::mbarrier_init(&arrived_[lane_idx()], 1);
    ptx::fence_mbarrier_init();
    __syncwarp();
  }

  /// `next` is the next call's `sum`, if it is known.
  __device__ void make(const Sum& sum, const Sum& next) {
    Cursor cursor = next_;
    next_ = {};
    for (int begin = 0; begin < row_bytes_; begin += kPieceBytes) {
      float numbers[kUnits][kPerUnit];
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
#pragma unroll
        for (int j = 0; j < kPerUnit; ++j) numbers[i][j] = first_;
      }
      for (unsigned rest = sum.lanes; rest != 0; rest &= rest - 1) {
        fetch(sum, cursor);
        fetch(next, next_);
        const float weight = __shfl_sync(kAllLanes, sum.weight, lowest(rest));
        const std::byte* piece = pieces_[added_];
        ptx::mbarrier_wait(&arrived_[added_], parity_);
#pragma unroll
        for (int i = 0; i < kUnits; ++i) {  // what is beyond the row's end is of no use, and is not stored
          const Lanes<T, kPerUnit> unit =
              get_lanes<kPerUnit>(reinterpret_cast<const T*>(piece + (i * kWarp + lane_idx()) * kUnitBytes));
#pragma unroll
          for (int j = 0; j < kPerUnit; ++j) numbers[i][j] = fmaf(weight, to_float(unit.x[j]), numbers[i][j]);
        }
        __syncwarp();  // the piece may be overwritten
        --num_fetched_;
        added_ = next_stage(added_);
        if (added_ == 0) parity_ ^= 1;
      }
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
        const int at = begin + (i * kWarp + lane_idx()) * kUnitBytes;
        if (at < row_bytes_) cuda::store_lanes(numbers[i], reinterpret_cast<T*>(sum.y + at));
      }
    }
  }

 private:
  static constexpr int kPerUnit = kUnitBytes / sizeof(T);

  /// How far the pieces of a sum have been asked for.
  struct Cursor {
    int begin = 0;
    unsigned rest = 0;  // rows of which this piece is still to come; none: all
  };

  __device__ static int next_stage(int stage) { return stage + 1 == kStages ? 0 : stage + 1; }

  /// Asks for as many pieces as there is room for.
  __device__ void fetch(const Sum& sum, Cursor& cursor) {
    while (num_fetched_ < kStages && cursor.begin < row_bytes_ && sum.lanes != 0) {
      if (cursor.rest == 0) cursor.rest = sum.lanes;
      const auto row = __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(sum.row), lowest(cursor.rest));
      if (lane_idx() == 0) {
        const auto num_bytes = static_cast<std::uint32_t>(min(kPieceBytes, row_bytes_ - cursor.begin));
        ptx::mbarrier_arrive_expect_tx(&arrived_[fetched_], num_bytes);
        ptx::bulk_load(pieces_[fetched_], reinterpret_cast<const std::byte*>(row) + cursor.begin, num_bytes,
                       &arrived_[fetched_]);
      }
      ++num_fetched_;
      fetched_ = next_stage(fetched_);
      cursor.rest &= cursor.rest - 1;
      if (cursor.rest == 0) cursor.begin += kPieceBytes;
    }
  }

  int row_bytes_;
  float first_;
  std::byte (*pieces_)[kPieceBytes];
  ptx::Barrier* arrived_;
  int num_fetched_ = 0;          // pieces that are not added yet
  int fetched_ = 0, added_ = 0;  // stages of the next ones
  std::uint32_t parity_ = 0;
  Cursor next_;
};

__device__ void send_sums(const CallArgs& call, const SumsArgs& args, const Share& share, auto& summing) {
  const int lane = lane_idx(), top_k = call.top_k, num_ranks = call.num_ranks;
  const int num_items = call.num_tokens * num_ranks;
  int item = share.warp;
  // Tokens of all ranks in turn, the next of which a copy came. Each warp, and each rank, begins with another's.
  const auto find = [&](int& t, int& home, int& row) {
    for (; item < num_items; item += share.num_warps) {
      t = item / num_ranks;
      home = static_cast<int>((item + call.rank + std::int64_t{t} * num_ranks / share.num_warps) % num_ranks);
      const int token = home * call.num_tokens + t;
      const int place = call.place_PT[token];
      row = lane < top_k ? call.row_PTK[token * top_k + lane] : -1;
      if (place < 0) continue;
      item += share.num_warps;
      const bool is_here = row >= 0;
      return Sum{.lanes = __ballot_sync(kAllLanes, is_here),
                 .row = args.x + row * args.row_bytes,
                 .weight = is_here && args.weights_R != nullptr ? args.weights_R[row] : 1.0f,
                 .y = at(call, home, args.sums) + (std::int64_t{t} * call.max_ranks_of_token + place) * args.row_bytes};
    }
    return Sum{};
  };
  int chunk = 0, next_t, next_home, next_row;
  Sum next = find(next_t, next_home, next_row);
  while (next.lanes != 0) {
    const Sum sum = next;
    const int t = next_t, home = next_home, row = next_row;
    next = find(next_t, next_home, next_row);
    for (; chunk < t / share.tokens_per_chunk; ++chunk) arrive(call, share, chunk);
    if (row >= 0 && args.d_weights_R != nullptr) {
      at(call, home, args.window_d_weights_TK)[t * top_k + lane] = args.d_weights_R[row];
    }
    summing.make(sum, next);
  }
  for (; chunk < call.num_chunks; ++chunk) arrive(call, share, chunk);
}

template <typename T>
__device__ void receive_sums(const CallArgs& call, const SumsArgs& args, const Share& share, Summing<T>& summing) {
  const int lane = lane_idx(), top_k = call.top_k, max_ranks = call.max_ranks_of_token;
  const auto find = [&](int t, bool& overloaded) {
    const int rank = lane < max_ranks ? call.rank_TJ[t * max_ranks + lane] : kNoRank;
    overloaded = __any_sync(kAllLanes, rank == kOverloaded);
    const unsigned copies = __ballot_sync(kAllLanes, rank >= 0);
    std::byte* y = args.y + t * args.row_bytes;
    const std::byte* sums = args.sums + std::int64_t{t} * max_ranks * args.row_bytes;
    // What y was comes first, if it is to stay.
    if (!args.accumulate) return Sum{.lanes = copies, .row = sums + lane * args.row_bytes, .y = y};
    return Sum{.lanes = copies << 1 | 1, .row = lane == 0 ? y : sums + (lane - 1) * args.row_bytes, .y = y};
  };
  int t = share.warp;
  for (int chunk = 0; chunk < call.num_chunks; ++chunk) {
    if (!await(call, Flag::kStored, share.epoch, chunk)) return;
    ptx::fence_proxy_async();  // before the copies of what was awaited
    const int end = share.end_of(call, chunk);
    bool overloaded = false;
    Sum next = t < end ? find(t, overloaded) : Sum{};
    for (; t < end; t += share.num_warps) {
      if (overloaded) {  // so that the step is dropped
        for (int i = lane; i < args.row_bytes / static_cast<int>(sizeof(T)); i += kWarp) {
          reinterpret_cast<T*>(args.y + t * args.row_bytes)[i] = from_float<T>(__int_as_float(0x7fffffff));
        }
        continue;
      }
      const Sum sum = next;
      next = t + share.num_warps < end ? find(t + share.num_warps, overloaded) : Sum{};
      if (args.d_weights_TK != nullptr && lane < top_k) {
        args.d_weights_TK[t * top_k + lane] = args.window_d_weights_TK[t * top_k + lane];
      }
      summing.make(sum, next);
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    sums_kernel(const __grid_constant__ CallArgs call, const __grid_constant__ SumsArgs args) {
  extern __shared__ __align__(128) std::byte memory[];
  const Share share(call);
  // An addition to what was there keeps a negative zero.
  Summing<T> summing(*reinterpret_cast<SumsMemory*>(memory), static_cast<int>(args.row_bytes),
                     !share.sends && args.accumulate ? -0.0f : 0.0f);
  const bool after_sums = *static_cast<volatile std::uint32_t*>(&call.state->after_sums) != 0;
  if (get_ready(call, share, after_sums)) {
    if (share.sends) {
      send_sums(call, args, share, summing);
    } else {
      receive_sums(call, args, share, summing);
    }
  }
  finish(call, share, true);
}

}  // namespace

void launch_rows(const cuda::Stream& stream, const CallArgs& call, const RowsArgs& args) {
  const auto grid = static_cast<unsigned>(call.num_blocks);
  if (call.call == Call::kDispatch) {
    rows_kernel<true><<<grid, kThreads, 0, stream.handle()>>>(call, args);
  } else {
    rows_kernel<false><<<grid, kThreads, 0, stream.handle()>>>(call, args);
  }
  TESSERA_CUDA(cudaGetLastError());
}

void launch_sums(const cuda::Stream& stream, DType dtype, const CallArgs& call, const SumsArgs& args) {
  cuda::for_float_type(dtype, [&]<typename T>(T) {
    TESSERA_CUDA(cudaFuncSetAttribute(sums_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(SumsMemory)));
    sums_kernel<T>
        <<<static_cast<unsigned>(call.num_blocks), kThreads, sizeof(SumsMemory), stream.handle()>>>(call, args);
  });
  TESSERA_CUDA(cudaGetLastError());
}

}  // namespace tessera::ep
