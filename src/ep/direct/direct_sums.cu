// Calls that store sums: combine, and dispatch's backward (direct_device.cuh).
#include "ep/direct/direct_device.cuh"

namespace tessera::ep {
namespace {

using cuda::get_lanes;
using cuda::Lanes;
using cuda::to_float;

// kSenders of every 16 blocks send sums. Senders have more to read, a row per choice. The other blocks read a sum per
// copy of a token.
constexpr int kSenders = 12;

/// Describes y = the sum of weight · row over the lanes that have a row, in their order. Without lanes there is no sum.
struct Sum {
  unsigned lanes = 0;
  const std::byte* row = nullptr;
  float weight = 1.0f;
  std::byte* y = nullptr;
};

/// Computes sums. Each warp has an object.
template <typename T>
class Summing {
 public:
  /// `first` is the initial value of sums.
  __device__ Summing(PiecesMemory& memory, int row_bytes, float first)
      : pieces_(memory), row_bytes_(row_bytes), first_(first) {}

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
        const std::byte* piece = pieces_.wait();
#pragma unroll
        for (int i = 0; i < kUnits; ++i) {  // numbers beyond the row's end are not stored
          const Lanes<T, kPerUnit> unit =
              get_lanes<kPerUnit>(reinterpret_cast<const T*>(piece + (i * kWarp + lane_idx()) * kUnitBytes));
#pragma unroll
          for (int j = 0; j < kPerUnit; ++j) numbers[i][j] = fmaf(weight, to_float(unit.x[j]), numbers[i][j]);
        }
        __syncwarp();
        pieces_.release();
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
  static constexpr int kUnits = kPieceBytes / kWarp / kUnitBytes;  // units of a piece per lane

  /// Holds how far the pieces of a sum have been requested.
  struct Cursor {
    int begin = 0;
    // These rows still need a request for their piece. If there are none, all rows do.
    unsigned rest = 0;
  };

  /// Requests as many pieces as there is room for.
  __device__ void fetch(const Sum& sum, Cursor& cursor) {
    while (pieces_.has_room() && cursor.begin < row_bytes_ && sum.lanes != 0) {
      if (cursor.rest == 0) cursor.rest = sum.lanes;
      const auto row = __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(sum.row), lowest(cursor.rest));
      pieces_.fetch(reinterpret_cast<const std::byte*>(row) + cursor.begin,
                    min(kPieceBytes, row_bytes_ - cursor.begin));
      cursor.rest &= cursor.rest - 1;
      if (cursor.rest == 0) cursor.begin += kPieceBytes;
    }
  }

  Pieces pieces_;
  int row_bytes_;
  float first_;
  Cursor next_;
};

__device__ void send_sums(const CallArgs& call, const SumsArgs& args, const WorkSplit& split, auto& summing) {
  const int lane = lane_idx(), top_k = call.top_k, num_ranks = call.num_ranks;
  const int num_items = call.num_tokens * num_ranks;
  int item = split.warp;
  // Tokens of all ranks take turns. `find` returns the next one of which a copy arrived. Warps and ranks start with
  // different ranks.
  const auto find = [&](int& t, int& home, int& row) {
    for (; item < num_items; item += split.num_warps) {
      t = item / num_ranks;
      home = static_cast<int>((item + call.rank + std::int64_t{t} * num_ranks / split.num_warps) % num_ranks);
      const int token = home * call.num_tokens + t;
      const int place = call.place_Pt[token];
      row = lane < top_k ? call.row_PtK[token * top_k + lane] : -1;
      if (place < 0) continue;
      item += split.num_warps;
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
    for (; chunk < t / split.tokens_per_chunk; ++chunk) arrive(call, split, chunk);
    if (row >= 0 && args.d_weights_R != nullptr) {
      at(call, home, args.window_d_weights_tK)[t * top_k + lane] = args.d_weights_R[row];
    }
    summing.make(sum, next);
  }
  for (; chunk < call.num_chunks; ++chunk) arrive(call, split, chunk);
}

template <typename T>
__device__ void receive_sums(const CallArgs& call, const SumsArgs& args, const WorkSplit& split, Summing<T>& summing) {
  const int lane = lane_idx(), top_k = call.top_k, max_ranks = call.max_ranks_of_token;
  const auto find = [&](int t) {
    const int rank = lane < max_ranks ? call.rank_tJ[t * max_ranks + lane] : kNoRank;
    const unsigned copies = __ballot_sync(kAllLanes, rank >= 0);
    std::byte* y = args.y + t * args.row_bytes;
    const std::byte* sums = args.sums + std::int64_t{t} * max_ranks * args.row_bytes;
    // If y accumulates, its old value comes first.
    if (!args.accumulate) return Sum{.lanes = copies, .row = sums + lane * args.row_bytes, .y = y};
    return Sum{.lanes = copies << 1 | 1, .row = lane == 0 ? y : sums + (lane - 1) * args.row_bytes, .y = y};
  };
  int t = split.warp;
  for (int chunk = 0; chunk < call.num_chunks; ++chunk) {
    if (!await(call, Flag::kStored, split.epoch, chunk)) return;
    // Generic loads have acquired the flags. This orders the bulk copies of the awaited rows after them.
    ptx::fence_proxy_async();
    const int end = split.end_of(call, chunk);
    Sum next = t < end ? find(t) : Sum{};
    for (; t < end; t += split.num_warps) {
      const Sum sum = next;
      next = t + split.num_warps < end ? find(t + split.num_warps) : Sum{};
      if (args.d_weights_tK != nullptr && lane < top_k) {
        const bool has_row = (call.choices_t[t] >> lane & 1) != 0;
        args.d_weights_tK[t * top_k + lane] = has_row ? args.window_d_weights_tK[t * top_k + lane] : 0.0f;
      }
      summing.make(sum, next);
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    sums_kernel(const __grid_constant__ CallArgs call, const __grid_constant__ SumsArgs args) {
  extern __shared__ __align__(128) std::byte memory[];
  const WorkSplit split(call, kSenders);
  // If sums are added to old values, they start at -0, so that a negative zero stays negative.
  Summing<T> summing(*reinterpret_cast<PiecesMemory*>(memory), static_cast<int>(args.row_bytes),
                     !split.sends && args.accumulate ? -0.0f : 0.0f);
  const bool after_sums = *static_cast<volatile std::uint32_t*>(&call.state->after_sums) != 0;
  if (get_ready(call, split, after_sums)) {
    if (split.sends) {
      send_sums(call, args, split, summing);
    } else {
      receive_sums(call, args, split, summing);
    }
  }
  finish(call, split, true);
}

}  // namespace

void launch_sums(const cuda::Stream& stream, DType dtype, const CallArgs& call, const SumsArgs& args) {
  cuda::for_float_type(dtype, [&]<typename T>(T) { launch(stream, sums_kernel<T>, call, args); });
}

}  // namespace tessera::ep
