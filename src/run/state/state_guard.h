// Guards a run's training state: compares the replicas' states, and keeps copies in the memory of nodes.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>

#include "comm/ranks.h"
#include "config/job_config.h"
#include "data/loader.h"
#include "run/record/run_folder.h"
#include "run/state/memory_copies.h"
#include "run/state/replica_check.h"
#include "run/state/training_state.h"

namespace tessera {

class StateGuard {
 public:
  /// All arguments must outlive the object.
  StateGuard(const JobConfig& config, Ranks& ranks, Mesh& mesh, const Parameters& parameters)
      : config_(config), ranks_(ranks), mesh_(mesh), state_(parameters) {}

  // All ranks must call the functions below together, except for those that are const.

  /// Decides where copies are kept, if checkpoint.memory_interval is set. `state_read_done` is that of MemoryCopies.
  void place_copies(cuda::Event* state_read_done);
  /// Prepares the comparison and searches for the copies of earlier attempts, as far as the configuration asks for it.
  void open(const RunIdentity& run, const data::Loader& loader);
  /// Returns the copies in memory. It is null without checkpoint.memory_interval.
  MemoryCopies* copies() { return copies_ ? &*copies_ : nullptr; }

  /// Returns whether states are compared after a step. `saves` says that a checkpoint follows, before which they always
  /// are. Without checkpoint.verify_interval and memory_interval they never are.
  bool verifies_after(std::int64_t step, bool saves) const;
  bool copies_after(std::int64_t step) const { return copies_ && copies_->is_due(step); }
  /// Returns whether a copy of an earlier step has left this rank's GPU.
  bool has_copied() const { return copies_ && copies_->ready(); }

  /// Says what is done after a step. It is the same on all ranks.
  struct Due {
    bool verifies = false;    // the states are compared, and their checksum is told
    bool copies = false;      // the state is copied, and compared before the copy counts
    bool has_copied = false;  // a copy of an earlier step has left all GPUs, and is compared first

    bool any() const { return verifies || copies || has_copied; }
  };
  /// Gets the checksum of the whole model's state after a step that is verified.
  using Tell = std::function<void(std::uint64_t)>;
  /// Does what is due after `step`. No step may be under way. `tell` may be empty. Throws StateMismatch. A copy may be
  /// compared, and `tell` called, in a later call.
  void run(std::int64_t step, const Due& due, const data::Loader& loader, const Tell& tell);
  /// Waits until the last copy is complete, if there are copies.
  void finish();
  /// Deletes this attempt's copies, after the end of the run.
  void remove_copies();

 private:
  const JobConfig& config_;
  Ranks& ranks_;
  Mesh& mesh_;
  TrainingState state_;
  std::optional<ReplicaCheck> replica_check_;  // with checkpoint.verify_interval or memory_interval
  std::optional<MemoryCopies> copies_;         // with checkpoint.memory_interval
};

}  // namespace tessera
