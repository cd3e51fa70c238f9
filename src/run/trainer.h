// The training loop: data, steps, validation, checkpoints, metrics.
#pragma once

#include <atomic>
#include <csignal>
#include <functional>
#include <memory>
#include <optional>

#include "comm/ranks.h"
#include "data/loader.h"
#include "data/tokenizers/tokenizer.h"
#include "run/record/metrics.h"
#include "run/record/run_folder.h"
#include "run/state/checkpointer.h"
#include "run/state/memory_copies.h"
#include "run/state/replica_check.h"
#include "step/training_step.h"

namespace tessera {

class Trainer {
 public:
  /// Opens the data, plans and takes the memory, resumes from a checkpoint if there is one. Throws Error. With `ranks`
  /// (null: one), which must stay, all ranks together. Rank 0 tells of the run and writes its files.
  explicit Trainer(JobConfig config, Ranks* ranks = nullptr);

  /// Trains to the last step, or until `stop_signal` is not 0 on some rank: then the step at hand is finished and
  /// saved, and a validation that is under way is given up. Returns the signal, or 0. `current_step`, for a signal
  /// handler that says what it waits for, is set to the step at hand.
  int run(const volatile std::sig_atomic_t& stop_signal, std::atomic<std::int64_t>* current_step = nullptr);

  /// For tests: called after each step.
  void set_step_callback(std::function<void(std::int64_t, const StepResult&)> callback) {
    step_callback_ = std::move(callback);
  }
  Model& model() { return step_.model(); }

 private:
  /// Mean loss of the split's first validation.steps global batches: the same sequences on every mesh. Nothing if a
  /// rank has got a signal before the end.
  std::optional<double> validate(const volatile std::sig_atomic_t& stop_signal);
  /// Waits for the oldest step that was started, and tells of it.
  void finish_step(MetricsWriter* metrics);
  /// Throws the error with the ranks on which it began. Together with all ranks.
  [[noreturn]] void fail_not_finite(const NonFiniteStep& error);
  bool measures_sqnr(std::int64_t step) const;
  /// Loads the newest state that there is, on disk or in memory.
  void resume();
  /// The run that rank 0 has identified, on all ranks.
  RunIdentity share_run_identity();
  /// Compares replicas' states if it `verifies`, and copies them to memory if it `copies`, which compares them as well.
  /// `has_copied`: a copy of an earlier step has left the GPUs, and is compared first. No step may be under way.
  void guard_state(std::int64_t step, bool verifies, bool copies, bool has_copied, MetricsWriter* metrics);
  /// Whether replicas' states are compared after a step, before a checkpoint if it `saves` one.
  bool verifies(std::int64_t step, bool saves) const;
  bool is_first_rank() const { return ranks_.rank() == 0; }
  /// What a rank's process takes.
  struct RankMemory {
    MemoryPlan plan;
    std::size_t snapshot = 0;  // the checkpoint's copy
    std::size_t copies = 0;    // copies in memory, on tmpfs
    std::size_t process = 0;   // resident before the plan's memory is allocated

    std::size_t total() const { return plan.total() + snapshot + copies + process; }
  };
  /// Returns the memory of every rank, by rank. All ranks must call it.
  std::vector<RankMemory> memory_of_ranks();
  void print_plan(const std::vector<RankMemory>& ranks) const;
  /// Throws Error if a machine or a GPU has less memory than the run needs there, by the plan.
  void require_memory(const std::vector<RankMemory>& ranks) const;

  Ranks one_rank_;
  Ranks& ranks_;
  JobConfig config_;
  std::shared_ptr<cuda::Runtime> cuda_;  // null on CPUs
  std::shared_ptr<Mesh> mesh_;
  std::filesystem::path dump_folder_;
  std::optional<RunFolder> run_folder_;         // on rank 0
  std::unique_ptr<data::Tokenizer> tokenizer_;  // goes into checkpoints
  std::unique_ptr<data::Loader> loader_, validation_loader_;
  TrainingStep step_;
  Checkpointer checkpointer_;
  TrainingState state_;
  std::optional<ReplicaCheck> replica_check_;      // with checkpoint.verify_interval or memory_interval
  std::optional<MemoryCopies> memory_copies_;      // with checkpoint.memory_interval
  std::vector<std::vector<Batch>> micro_batches_;  // of as many steps as may be started, by step
  std::vector<double> data_seconds_;               // as micro_batches_
  std::vector<std::int32_t> tokens_;
  std::int64_t first_step_ = 1;
  std::optional<JobConfig> resumed_config_;  // of the checkpoint that this run goes on from, on rank 0
  TraceRecorder trace_;
  std::function<void(std::int64_t, const StepResult&)> step_callback_;
};

}  // namespace tessera
