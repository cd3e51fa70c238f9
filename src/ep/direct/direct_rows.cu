// Calls that store rows: dispatch, dispatch again and combine's backward (direct_device.cuh).
#include "ep/direct/direct_device.cuh"

namespace tessera::ep {
namespace {

// kSenders of every 16 blocks send tokens. The other blocks copy the tokens that have come. If the output is the
// window, they copy each token from its first row to its other rows. Otherwise they copy it to all its rows in the
// output.
constexpr int kSenders = 7;

/// Describes a range of bytes that a warp copies.
struct Source {
  const std::byte* from = nullptr;
  int num_bytes = 0;
};

/// Copies rows. Each warp has an object.
class RowCopier {
 public:
  __device__ explicit RowCopier(PiecesMemory& memory) : pieces_(memory) {}

  /// Copies to the addresses that `lanes` have in `to`. All sizes are whole multiples of 16 bytes. `next` is the
  /// `source` of the next call, if it is known.
  __device__ void copy(const Source& source, unsigned lanes, std::byte* to, const Source& next) {
    const bool has_target = (lanes >> lane_idx() & 1) != 0;
    int asked = next_asked_;
    next_asked_ = 0;
    for (int begin = 0; begin < source.num_bytes; begin += kPieceBytes) {
      fetch(source, asked);
      fetch(next, next_asked_);
      const std::byte* piece = pieces_.wait();
      const int num_bytes = min(kPieceBytes, source.num_bytes - begin);
      if (has_target) ptx::bulk_store(to + begin, piece, static_cast<std::uint32_t>(num_bytes));
      ptx::tma_store_commit();
      // All pieces but this one have been read.
      ptx::tma_store_wait_read<1>();
      __syncwarp();
      if (is_reading_) pieces_.release();
      is_reading_ = true;
    }
  }
  /// Returns when everything is written.
  __device__ void finish() { ptx::tma_store_wait<0>(); }

 private:
  __device__ void fetch(const Source& source, int& asked) {
    for (; asked < source.num_bytes && pieces_.has_room(); asked += kPieceBytes) {
      pieces_.fetch(source.from + asked, min(kPieceBytes, source.num_bytes - asked));
    }
  }

  Pieces pieces_;
  bool is_reading_ = false;  // the last piece may still be read
  int next_asked_ = 0;       // requested bytes of the next source
};

/// Returns the `to` of lane `of`. The whole warp executes it.
__device__ std::byte* target_of(int of, std::byte* to) {
  return reinterpret_cast<std::byte*>(__shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(to), of));
}

/// Returns where a row of `part` is read: from own tokens if they are sent, or else from the window.
template <bool kSends>
__device__ const std::byte* row_of(const RowPart& part, int row) {
  return (kSends ? part.tokens : part.window) + row * part.row_bytes;
}

/// Returns row `row` for RowCopier::copy. It is empty if the row is -1 or if the first part is not copied in pieces.
template <bool kSends>
__device__ Source source_of(const RowsArgs& args, int row) {
  const RowPart& part = args.parts[0];
  if (row < 0 || part.copied != RowPart::Copied::kPieces) return {};
  return {row_of<kSends>(part, row), static_cast<int>(part.row_bytes)};
}

/// Copies all parts of a row to the targets of `lanes`. The whole warp executes it. to(part) is the start of a part's
/// target rows, and `to_row` is the row there. `next_row` is the row of the next call, or -1 if that is not known.
template <bool kSends, typename To>
__device__ void copy_row(const RowsArgs& args, int row, unsigned lanes, const To& to, int to_row, int next_row,
                         RowCopier& copier) {
  using Copied = RowPart::Copied;
  const int lane = lane_idx(), begin = lane * kUnitBytes;
  const bool has_target = (lanes >> lane & 1) != 0;
  // The units that lanes copy are loaded while pieces are copied.
  uint4 held{};
  for (int p = 0; p < args.num_parts; ++p) {
    const RowPart& part = args.parts[p];
    if (part.copied == Copied::kLanes && begin < part.row_bytes) {
      held = *reinterpret_cast<const uint4*>(row_of<kSends>(part, row) + begin);
    }
  }
  for (int p = 0; p < args.num_parts; ++p) {
    const RowPart& part = args.parts[p];
    std::byte* target = has_target ? to(part) + to_row * part.row_bytes : nullptr;
    if (part.copied == Copied::kPieces) {
      copier.copy(source_of<kSends>(args, row), lanes, target, source_of<kSends>(args, next_row));
      continue;
    }
    for (unsigned rest = lanes; rest != 0; rest &= rest - 1) {
      std::byte* lane_target = target_of(lowest(rest), target);
      if (part.copied == Copied::kLanes) {
        if (begin < part.row_bytes) *reinterpret_cast<uint4*>(lane_target + begin) = held;
      } else {
        const std::byte* from = row_of<kSends>(part, row);
        for (std::int64_t i = lane; i < part.row_bytes; i += kWarp) lane_target[i] = from[i];
      }
    }
  }
}

struct Placement {
  std::int32_t total[kMaxGpuExperts];  // rows per expert
  std::int32_t base[kMaxGpuExperts];   // row of a slot of this rank, minus its index among the sorted slots
  // Rows of this rank's experts. The last end is not used.
  std::int32_t offsets[kMaxGpuExperts + 1], ends[kMaxGpuExperts + 1];
  std::int32_t num_later_rounds;
};

/// Returns the counts of a dispatch in this rank's window.
__device__ std::int32_t* counts_of(const CallArgs& call, const RowsArgs& args, std::uint64_t epoch) {
  return args.counts_PE + static_cast<int>(epoch % 2) * call.num_ranks * args.num_experts;
}

/// Computes where rows of this round go, from all ranks' counts (placement.h). The whole block executes it.
__device__ void place(const CallArgs& call, const RowsArgs& args, const std::int32_t* counts_PE, Placement& placement) {
  static_assert(kThreads >= kMaxGpuRanks);  // a thread for each rank
  const int num_ranks = call.num_ranks, local = args.num_local_experts;
  if (threadIdx.x == 0) placement.num_later_rounds = 0;
  for (int x = static_cast<int>(threadIdx.x); x < args.num_experts; x += kThreads) {
    std::int32_t before = 0, total = 0;
    for (int source = 0; source < num_ranks; ++source) {
      if (source == call.rank) before = total;
      total += counts_PE[source * args.num_experts + x];
    }
    placement.total[x] = total;
    placement.base[x] = before - args.sorted_offsets_E1[x];
  }
  __syncthreads();
  const int rank = static_cast<int>(threadIdx.x);
  if (rank < num_ranks) {
    const std::int32_t begin = args.is_later_round ? args.rounds_2[1] * args.max_rows : 0;
    const auto in_round = [&](std::int32_t row) { return min(max(row - begin, 0), args.max_rows); };
    std::int32_t row = 0;
    for (int i = 0; i < local; ++i) {
      const std::int32_t total = placement.total[rank * local + i];
      placement.base[rank * local + i] += row - begin;
      if (rank == call.rank) {
        placement.offsets[i] = in_round(row);
        placement.ends[i] = in_round(row + total);
      }
      row = (row + total + args.alignment - 1) / args.alignment * args.alignment;
    }
    if (rank == call.rank) placement.offsets[local] = in_round(row);
    atomicMax(&placement.num_later_rounds, (row + args.max_rows - 1) / args.max_rows - 1);
  }
  __syncthreads();
}

/// Holds what is read of a token in advance, before the token is sent. In a dispatch, a lane has the token's k-th
/// choice. In other calls it has the j-th copy that the dispatch decided on.
struct PlannedSend {
  int to = -1;  // the expert in a dispatch, or else the rank
  int row = 0;  // index of the choice among the expert's on this rank, or else the copy's first row
  float weight = 0.0f;
};
static_assert(kNoExpert < 0 && kNoRank < 0);

template <bool kDispatch>
__device__ PlannedSend read_planned_send(const CallArgs& call, const RowsArgs& args, int t) {
  const int lane = lane_idx(), num_lanes = kDispatch ? call.top_k : call.max_ranks_of_token;
  if (t >= call.num_tokens || lane >= num_lanes) return {};
  const int i = t * num_lanes + lane;
  if constexpr (kDispatch) return {args.expert_ids_tK[i], args.row_of_slot_tK[i], args.weights_tK[i]};
  return {call.rank_tJ[i], args.first_row_tJ[i]};
}

/// Decides where the copies of token t go in a dispatch, and stores their records. The whole warp executes it. Each
/// lane of the result has a copy's rank in `target_rank` and its first row in `target_row`. A choice whose row is of
/// another round makes no copy.
__device__ unsigned send_records(const CallArgs& call, const RowsArgs& args, const Placement& placement, int t,
                                 const PlannedSend& choice, int& target_rank, int& target_row) {
  const int lane = lane_idx(), top_k = call.top_k, max_ranks = call.max_ranks_of_token;
  const int token = call.rank * call.num_tokens + t;
  int rank = kNoRank, row = -1;
  if (choice.to >= 0) {
    row = placement.base[choice.to] + choice.row;
    if (0 <= row && row < args.max_rows) rank = choice.to / args.num_local_experts;
  }
  const unsigned with_row = __ballot_sync(kAllLanes, rank != kNoRank);
  if (lane == 0) call.choices_t[t] = with_row;
  const unsigned same = __match_any_sync(kAllLanes, rank);
  const bool is_first = rank != kNoRank && lowest(same) == lane;
  const unsigned firsts = __ballot_sync(kAllLanes, is_first);
  int place = 0;
  for (unsigned rest = firsts; rest != 0; rest &= rest - 1) {
    place += __shfl_sync(kAllLanes, rank, lowest(rest)) < rank ? 1 : 0;
  }
  if (is_first) {
    call.rank_tJ[t * max_ranks + place] = rank;
    args.first_row_tJ[t * max_ranks + place] = row;
  }
  if (__popc(firsts) <= lane && lane < max_ranks) call.rank_tJ[t * max_ranks + lane] = kNoRank;
  for (int begin = 0; begin < call.num_ranks; begin += kWarp) {
    const int peer = begin + lane;
    int peer_place = -1;
    for (unsigned rest = firsts; rest != 0; rest &= rest - 1) {
      const int copy_rank = __shfl_sync(kAllLanes, rank, lowest(rest));
      const int copy_place = __shfl_sync(kAllLanes, place, lowest(rest));
      if (copy_rank == peer) peer_place = copy_place;
    }
    if (peer < call.num_ranks) at(call, peer, args.window_place_Pt)[token] = peer_place;
  }
  for (unsigned rest = firsts; rest != 0; rest &= rest - 1) {
    const int peer = __shfl_sync(kAllLanes, rank, lowest(rest));
    if (lane < top_k)
      at(call, peer, args.window_choice_PtK)[token * top_k + lane] = {rank == peer ? row : -1, choice.weight};
  }
  target_rank = rank;
  target_row = row;
  return firsts;
}

/// Finds the copies of token t. The whole warp executes it. Each token starts with a different copy, so that not all
/// ranks store to the same rank at once.
__device__ unsigned find_copies(const CallArgs& call, int t, const PlannedSend& copy, int& target_rank,
                                int& target_row) {
  const int num_copies = __popc(__ballot_sync(kAllLanes, copy.to >= 0));
  if (num_copies == 0) return 0;
  const int from = (lane_idx() + t + call.rank) % num_copies;
  target_rank = __shfl_sync(kAllLanes, copy.to, from);
  target_row = __shfl_sync(kAllLanes, copy.row, from);
  return kAllLanes >> (kWarp - num_copies);
}

template <bool kDispatch>
__device__ void send_rows(const CallArgs& call, const RowsArgs& args, const WorkSplit& split,
                          const Placement& placement, RowCopier& copier) {
  int t = split.warp;
  PlannedSend next = read_planned_send<kDispatch>(call, args, t);
  for (int chunk = 0; chunk < call.num_chunks; ++chunk) {
    for (; t < split.end_of(call, chunk); t += split.num_warps) {
      const PlannedSend planned = next;
      const int next_t = t + split.num_warps;
      next = read_planned_send<kDispatch>(call, args, next_t);
      int rank = 0, row = 0;
      const unsigned copies = kDispatch ? send_records(call, args, placement, t, planned, rank, row)
                                        : find_copies(call, t, planned, rank, row);
      copy_row<true>(
          args, t, copies, [&](const RowPart& part) { return at(call, rank, part.window); }, row,
          next_t < call.num_tokens ? next_t : -1, copier);
    }
    copier.finish();
    arrive(call, split, chunk);
  }
}

/// Zeros the padding of the output rows.
__device__ void clear_padding(const RowsArgs& args, const WorkSplit& split, const Placement& placement) {
  for (int i = 0; i < args.num_local_experts; ++i) {
    for (int row = placement.ends[i] + split.warp; row < placement.offsets[i + 1]; row += split.num_warps) {
      for (int p = 0; p < args.num_parts; ++p) {
        const RowPart& part = args.parts[p];
        if (part.out == nullptr) continue;
        std::byte* out = part.out + row * part.row_bytes;
        for (std::int64_t at = lane_idx(); at < part.row_bytes; at += kWarp) out[at] = std::byte{0};
      }
    }
  }
}

/// Processes as many tokens of a source at a time as a warp has lanes for their choices.
template <bool kDispatch>
__device__ void receive_rows(const CallArgs& call, const RowsArgs& args, const WorkSplit& split,
                             const Placement& placement, RowCopier& copier) {
  const int lane = lane_idx(), top_k = call.top_k, at_once = kWarp / top_k;
  const int token_in_group = lane / top_k, k = lane % top_k;
  // True if the window is the output. Then the first row of each copy is already in place.
  const bool in_place = args.parts[0].out == args.parts[0].window;
  clear_padding(args, split, placement);
  int group = split.warp;
  for (int chunk = 0; chunk < call.num_chunks; ++chunk) {
    if (!await(call, Flag::kStored, split.epoch, chunk)) break;
    // Generic loads have acquired the flags. This orders the bulk copies of the awaited rows after them.
    ptx::fence_proxy_async();
    const int first = chunk * split.tokens_per_chunk, count = split.end_of(call, chunk) - first;
    const int groups = (max(count, 0) + at_once - 1) / at_once * call.num_ranks;
    for (; group < groups; group += split.num_warps) {
      const int in_chunk = group / call.num_ranks * at_once + token_in_group;
      const int token = group % call.num_ranks * call.num_tokens + first + in_chunk;
      const bool has_token = token_in_group < at_once && in_chunk < count;
      GpuChoice choice{-1, 0.0f};
      int place = -1;
      if (has_token) {
        if constexpr (kDispatch) {
          place = args.window_place_Pt[token];
          choice = args.window_choice_PtK[token * top_k + k];
          if (k == 0) call.place_Pt[token] = place;
        } else {
          place = call.place_Pt[token];
          choice.row = call.row_PtK[token * top_k + k];
        }
      }
      const bool is_here = place >= 0 && choice.row >= 0;
      const unsigned here = __ballot_sync(kAllLanes, is_here);
      const unsigned of_token = __match_any_sync(kAllLanes, token_in_group) & here;
      const int first_row = __shfl_sync(kAllLanes, choice.row, of_token == 0 ? lane : lowest(of_token));
      if constexpr (kDispatch) {
        if (place >= 0) call.row_PtK[token * top_k + k] = choice.row;
        if (is_here) {
          args.source_of_row_R[choice.row] = first_row;
          args.weights_R[choice.row] = choice.weight;
        }
      }
      if (args.parts[0].out == nullptr) continue;
      const unsigned wanted = in_place ? of_token & (of_token - 1) : of_token;
      const bool is_begin = token_in_group < at_once && k == 0 && wanted != 0;
      for (unsigned rest = __ballot_sync(kAllLanes, is_begin); rest != 0; rest &= rest - 1) {
        const unsigned later = rest & (rest - 1);
        const unsigned lanes = __shfl_sync(kAllLanes, wanted, lowest(rest));
        const int row = __shfl_sync(kAllLanes, first_row, lowest(rest));
        const int later_row = __shfl_sync(kAllLanes, first_row, later != 0 ? lowest(later) : 0);
        copy_row<false>(
            args, row, lanes, [](const RowPart& part) { return part.out; }, choice.row, later != 0 ? later_row : -1,
            copier);
      }
    }
    group -= groups;  // The next chunk starts with the next warp, so that all warps have equal work.
  }
  copier.finish();
}

template <bool kDispatch>
__global__ void __launch_bounds__(kThreads)
    rows_kernel(const __grid_constant__ CallArgs call, const __grid_constant__ RowsArgs args) {
  extern __shared__ __align__(128) std::byte memory[];
  __shared__ Placement placement;
  const WorkSplit split(call, kSenders);
  RowCopier copier(*reinterpret_cast<PiecesMemory*>(memory));
  std::int32_t* counts_PE = counts_of(call, args, split.epoch);
  if (kDispatch && blockIdx.x == 0) {
    for (int i = static_cast<int>(threadIdx.x); i < call.num_ranks * args.num_experts; i += kThreads) {
      const int peer = i / args.num_experts, x = i % args.num_experts;
      at(call, peer, counts_PE)[call.rank * args.num_experts + x] = args.counts_E[x];
    }
    __syncthreads();
  }
  const bool ready = get_ready(call, split, true);
  if (kDispatch && ready) place(call, args, counts_PE, placement);
  if (kDispatch && !args.is_later_round && blockIdx.x == 0 && threadIdx.x == 0) {
    args.rounds_2[0] = ready ? placement.num_later_rounds : 0;
  }
  for (int i = static_cast<int>(threadIdx.x); i <= args.num_local_experts; i += kThreads) {
    if constexpr (kDispatch) {
      // If nothing arrives, the experts have nothing to do.
      if (blockIdx.x == 0) args.offsets_e1[i] = ready ? placement.offsets[i] : 0;
      if (blockIdx.x == 0 && i < args.num_local_experts) args.ends_e[i] = ready ? placement.ends[i] : 0;
    } else {
      placement.offsets[i] = args.offsets_e1[i];
      if (i < args.num_local_experts) placement.ends[i] = args.ends_e[i];
    }
  }
  __syncthreads();
  if (ready) {
    if (split.sends) {
      send_rows<kDispatch>(call, args, split, placement, copier);
    } else {
      receive_rows<kDispatch>(call, args, split, placement, copier);
    }
  }
  finish(call, split, false);
}

__global__ void next_round_kernel(std::int32_t* rounds_2, bool is_first, bool in_loop,
                                  cudaGraphConditionalHandle condition) {
  const std::int32_t round = is_first ? 1 : rounds_2[1] + 1;
  rounds_2[1] = round;
  if (in_loop) cudaGraphSetConditional(condition, round <= rounds_2[0] ? 1 : 0);
}

}  // namespace

void launch_next_round(const cuda::Stream& stream, std::int32_t* rounds_2, bool is_first,
                       std::optional<unsigned long long> condition) {
  next_round_kernel<<<1, 1, 0, stream.handle()>>>(rounds_2, is_first, condition.has_value(), condition.value_or(0));
  TESSERA_CUDA(cudaGetLastError());
}

void launch_rows(const cuda::Stream& stream, const CallArgs& call, const RowsArgs& args) {
  launch(stream, call.call == Call::kDispatch ? rows_kernel<true> : rows_kernel<false>, call, args);
}

}  // namespace tessera::ep
