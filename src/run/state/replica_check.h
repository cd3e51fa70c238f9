// Finds numbers that a fault has changed on one rank: ranks that hold the same state compare its checksums.
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

/// Reports that ranks which should hold the same state hold different ones. The run should resume from an earlier copy.
class StateMismatch : public Error {
 public:
  explicit StateMismatch(const std::string& message) : Error(message, ExitStatus::kWeightsDiffer) {}
};

/// The name of a file in a run's folder. It has a line of JSON per mismatch, and one per mismatch that a replay has
/// explained.
inline constexpr const char* kMismatchesName = "state_mismatches.jsonl";

/// Holds the result of a replay: the ranks whose state was wrong after a step.
struct WrongState {
  std::int64_t step = 0;
  std::vector<std::int64_t> ranks;  // ranks whose state differed from the replay's
};
/// Returns what the last line of that file says, if it is the result of a replay by this attempt.
std::optional<WrongState> find_replayed_state(const std::filesystem::path& dump_folder, std::int64_t attempt);

class ReplicaCheck {
 public:
  /// Ranks, mesh and state must outlive the object. `attempt` and `identity` are the run's, for the file in
  /// `dump_folder`, which rank 0 writes. Only a run of the same identity replays what an earlier attempt has computed.
  ReplicaCheck(Ranks& ranks, Mesh& mesh, const TrainingState& state, const std::filesystem::path& dump_folder,
               std::int64_t attempt, std::string identity);

  /// Returns whether more than one rank holds the same weights.
  bool sees_weights() const { return mesh_.degrees.dp_replicate > 1; }
  /// Returns whether an earlier attempt found a mismatch at this step that no replay has explained yet.
  bool explains(std::int64_t step) const { return open_ && open_->step == step; }

  /// Compares the checksums of all ranks' states after `step`. Returns a checksum of the whole model's state. If states
  /// differ, all ranks throw StateMismatch, which names the first part that differs and every rank's checksum of it.
  /// After a rollback, at the step of the mismatch, it reports the ranks whose state was wrong: those that differ from
  /// the replay. All ranks must call it together.
  std::uint64_t compare(std::int64_t step, const TrainingState::Checksums& own);

 private:
  /// Describes the mismatch in the file's last line that no replay has explained.
  struct Open {
    std::int64_t step = 0;
    std::vector<std::pair<std::int64_t, std::uint64_t>> checksums;  // pairs of rank and checksum
  };
  /// Returns the shard that a rank holds. Ranks with the same shard hold the same weights.
  std::int64_t shard_of(std::int64_t rank) const;
  std::string describe_mismatch(std::int64_t step);
  /// Finds the mismatch in the file's last line that this run may explain. Only rank 0 calls it.
  std::optional<Open> find_open() const;
  /// Appends a line to the file. Only rank 0 calls it.
  void append(const std::string& line) const;

  Ranks& ranks_;
  Mesh& mesh_;
  const TrainingState& state_;
  std::filesystem::path path_;
  std::int64_t attempt_;
  std::string identity_;
  std::optional<Open> open_;  // its checksums are on rank 0 only
};

}  // namespace tessera
