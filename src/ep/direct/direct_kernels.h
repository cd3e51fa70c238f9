// Launches the kernels of the direct dispatcher on GPUs (direct_device.cuh), one per call. Only sources that are built
// with CUDA include this.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "device/cuda.h"
#include "ep/direct/protocol.h"
#include "tensor/tensor.h"

namespace tessera::ep {

/// What the kernels take. A block has a thread per rank. A warp has a lane for each choice of a token, and one more for
/// an old value. The experts' places are in shared memory, beside the pieces of rows.
inline constexpr int kMaxGpuRanks = 72, kMaxGpuExperts = 1024, kMaxGpuTopK = 24;
/// The largest number of chunks that a call's tokens are cut into. One chunk is worked on while the next is stored.
inline constexpr int kMaxChunks = 16;

/// Holds a failure that a rank's GPU has found, for the host to read. The first one stays.
struct GpuReport {
  enum class Kind : std::int32_t { kNone, kLate };  // a wait timed out
  Kind kind;
  std::int32_t layer;
  Call call;
  Flag flag;
  std::int32_t source;
  std::uint64_t expected, seen;  // epochs
};

/// Holds the state of a rank's GPU that lasts from call to call. Zeroed memory means that no call was made.
struct GpuState {
  std::uint64_t epoch;
  std::uint32_t after_sums;  // as in CallSequence
  std::uint32_t failed;      // a wait has timed out, and nothing is done any more
  std::uint32_t num_finished;
  std::uint32_t arrivals[kMaxChunks];
};

/// Holds one choice of a token whose copy is stored. `row` is on the rank that gets the copy. It is -1 if the choice
/// has no row there.
struct GpuChoice {
  std::int32_t row;
  float weight;
};

struct CallArgs {
  Call call;
  std::int32_t layer;
  int rank, num_ranks;
  int num_tokens, top_k, max_ranks_of_token;
  int num_blocks, num_chunks;
  std::uint64_t timeout_ns;
  GpuState* state;
  GpuReport* report;
  std::byte* peers[kMaxGpuRanks];  // windows; a pointer into this rank's window stands for the same place in all
  std::byte* flags;
  // The members below point into DispatchSaved. Bit k of choices_t is set if the token's k-th choice has a row in this
  // round.
  std::int32_t *rank_tJ, *place_Pt, *row_PtK;
  std::uint32_t* choices_t;
};

/// Describes one tensor of a payload: the rows' elements, or their scales.
struct RowPart {
  /// Says how a warp copies a row.
  /// - kPieces: through shared memory, in multiples of 16 bytes.
  /// - kLanes: 16 bytes by each lane. This is for a row's scales, where a piece of 224 bytes would cost as much as one
  ///   of 4096.
  /// - kBytes: byte by byte.
  enum class Copied : std::int32_t { kPieces, kLanes, kBytes };

  const std::byte* tokens;
  std::byte* window;
  std::byte* out;  // where rows are wanted, which may be the window; null: nowhere
  std::int64_t row_bytes;
  Copied copied;
};
inline constexpr int kMaxLanesBytes = 32 * 16;  // the longest row that a warp copies by lanes

/// Holds the arguments of the calls that store rows: dispatch, dispatch_again and combine_backward.
struct RowsArgs {
  RowPart parts[2];  // at most the first one in pieces, at most the second one by lanes
  int num_parts;
  std::int32_t* first_row_tJ;
  std::int32_t *offsets_e1, *ends_e;
  int num_local_experts;
  // The members below are for dispatch only.
  int num_experts, alignment, max_rows;
  std::int32_t* rounds_2;  // DispatchSaved::rounds_2
  bool is_later_round;
  const std::int32_t *expert_ids_tK, *counts_E;
  const float* weights_tK;
  const std::int32_t *row_of_slot_tK, *sorted_offsets_E1;  // slots sorted by expert
  std::int32_t *counts_PE, *window_place_Pt;               // in the window; counts of even epochs, then of odd ones
  GpuChoice* window_choice_PtK;
  std::int32_t* source_of_row_R;
  float* weights_R;
};

/// Holds the arguments of the calls that store sums: combine and dispatch_backward.
struct SumsArgs {
  std::int64_t row_bytes;  // a multiple of 16
  const std::byte* x;
  std::byte *sums, *y;  // `sums` is in the window
  bool accumulate;
  const float* weights_R;  // null: all are 1
  // The members below are null except in dispatch_backward.
  const float* d_weights_R;
  float *window_d_weights_tK, *d_weights_tK;
};

/// Advances the current round in rounds_2 (DispatchSaved::rounds_2): to round 1 if is_first is true, otherwise by one.
/// If the rounds are a loop in a graph, `condition` is the loop's, and is set to whether that round exists.
void launch_next_round(const cuda::Stream& stream, std::int32_t* rounds_2, bool is_first,
                       std::optional<unsigned long long> condition);
void launch_rows(const cuda::Stream& stream, const CallArgs& call, const RowsArgs& args);
/// `dtype` is the type of the sums: float32 or bfloat16.
void launch_sums(const cuda::Stream& stream, DType dtype, const CallArgs& call, const SumsArgs& args);

}  // namespace tessera::ep
