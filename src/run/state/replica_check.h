// Finds numbers that a fault has changed on one rank: ranks that hold the same state compare checksums of it.
//
// Replicas (data_parallel_replicate_degree) hold the same masters, moments and expert biases, and all ranks of a
// pipeline stage hold the same expert biases. Nothing else is held twice: tensor-parallel ranks hold different shards
// of every parameter. A bit that flips in one replica's state stays different in all later steps.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "comm/ranks.h"
#include "run/state/training_state.h"

namespace tessera {

/// Ranks that should hold the same state hold different ones. The run should go on from an earlier copy.
class StateMismatch : public Error {
 public:
  explicit StateMismatch(const std::string& message) : Error(message, ExitStatus::kWeightsDiffer) {}
};

/// File of a run's folder: a line of JSON per mismatch, and one per mismatch that a replay has explained.
inline constexpr const char* kMismatchesName = "state_mismatches.jsonl";

/// What the last line of that file says, if it is of a replay that this attempt made.
struct WrongState {
  std::int64_t step = 0;
  std::vector<std::int64_t> ranks;  // whose state was another than the replay's
};
std::optional<WrongState> find_replayed_state(const std::filesystem::path& dump_folder, std::int64_t attempt);

class ReplicaCheck {
 public:
  /// All of these must stay. `attempt`: of the run, for the file in `dump_folder`, which rank 0 writes.
  ReplicaCheck(Ranks& ranks, Mesh& mesh, const TrainingState& state, const std::filesystem::path& dump_folder,
               std::int64_t attempt);

  /// Whether weights are held by more than one rank.
  bool sees_weights() const { return mesh_.degrees.dp_replicate > 1; }
  /// True for the step at which an earlier attempt found a mismatch, unless a replay has explained it already.
  bool explains(std::int64_t step) const { return open_ && open_->step == step; }

  /// Compares the checksums of all ranks' states after `step`. Returns a checksum of the whole model's state. Throws
  /// StateMismatch on all ranks, naming the first part that differs and every rank's checksum of it. After a rollback,
  /// at the step of the mismatch, says which ranks' state was wrong: those that the replay differs from. Together with
  /// all ranks.
  std::uint64_t compare(std::int64_t step, const TrainingState::Checksums& own);

 private:
  /// A mismatch that no replay has explained, in the file's last line.
  struct Open {
    std::int64_t step = 0;
    std::vector<std::pair<std::int64_t, std::uint64_t>> checksums;  // of ranks
  };
  /// Ranks with the same value hold the same weights.
  std::int64_t shard_of(std::int64_t rank) const;
  std::string describe_mismatch(std::int64_t step);
  /// Appends a line to the file, on rank 0.
  void append(const std::string& line) const;

  Ranks& ranks_;
  Mesh& mesh_;
  const TrainingState& state_;
  std::filesystem::path path_;
  std::int64_t attempt_;
  std::optional<Open> open_;  // `checksums` on rank 0 only
};

}  // namespace tessera
