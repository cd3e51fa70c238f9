// The training loop: data, steps, validation, checkpoints, metrics.
#pragma once

#include <atomic>
#include <csignal>
#include <functional>
#include <memory>
#include <optional>

#include "comm/ranks.h"
#include "run/record/metrics.h"
#include "run/record/run_folder.h"
#include "run/state/checkpointer.h"
#include "run/state/state_guard.h"
#include "run/step_batches.h"
#include "run/training_data.h"
#include "step/training_step.h"

namespace tessera {

class Trainer {
 public:
  /// Opens the data, plans and takes the memory, and resumes from a checkpoint if there is one. Throws Error. All of
  /// `ranks`, which must outlive the trainer, must call it together. Null means one rank. Rank 0 reports the run and
  /// writes its files.
  explicit Trainer(JobConfig config, Ranks* ranks = nullptr);

  /// Trains to the last step, or until `stop_signal` is not 0 on some rank. Then it finishes and saves the current
  /// step, and gives up a validation that is under way. The next start makes up for the last one. Returns the signal if
  /// it stopped the run and reached this rank, or else 0. It stores the current step in `current_step`. A signal
  /// handler uses that to say what it waits for. Throws Error.
  int run(const volatile std::sig_atomic_t& stop_signal, std::atomic<std::int64_t>* current_step = nullptr);

  /// Sets a function that is called after each step, for tests.
  void set_step_callback(std::function<void(std::int64_t, const StepResult&)> callback) {
    step_callback_ = std::move(callback);
  }
  Model& model() { return step_.model(); }

 private:
  /// Returns the mean loss of the split's first validation.steps global batches, which are the same sequences on every
  /// mesh. Returns nullopt if a rank gets a signal before the end.
  std::optional<double> validate(const volatile std::sig_atomic_t& stop_signal);
  /// Waits for the oldest step that was started, and reports it.
  void finish_step(MetricsWriter* metrics);
  /// Throws the error with the ranks on which it began. All ranks must call it together.
  [[noreturn]] void fail_not_finite(const NonFiniteStep& error);
  /// Finishes the save and the copy that are under way when all ranks end with an error. Logs errors of its own.
  void finish_after_error();
  bool measures_sqnr(std::int64_t step) const;

  /// Says what is done in a step and after it, as far as the configuration decides. It is the same on all ranks.
  struct StepPlan {
    bool profiles, measures;  // the step is traced on rank 0; its quantization errors are measured
    bool validates, saves;    // after the step
    bool is_last;             // the last step of the run

    /// Returns whether earlier steps must be finished first. Otherwise the host's work for this step would count as
    /// theirs.
    bool is_alone() const { return profiles || measures; }
  };
  StepPlan plan_of(std::int64_t step) const;
  /// Holds what all ranks agree on after a step. A signal may reach only some ranks, or some a step later. One is
  /// enough.
  struct Votes {
    bool stops;
    bool has_written, has_copied;  // all ranks have written their checkpoint files; all copies have left the GPUs
  };
  Votes agree(const volatile std::sig_atomic_t& stop_signal);
  class StepTrace;
  /// Fills a step's batches and starts it. Finishes earlier steps that must not be under way at the same time.
  void start_step(std::int64_t step, const StepPlan& plan, MetricsWriter* metrics);
  /// Says what follows a step. With kDone the run ends, with all steps and the last validation done. With kStopped it
  /// ends because of a signal.
  enum class StepOutcome : std::uint8_t { kNextStep, kDone, kStopped };
  /// Does validation, comparison, copies and checkpoints after a step that was started. `trace` is that step's trace,
  /// or null.
  StepOutcome end_step(std::int64_t step, const StepPlan& plan, const volatile std::sig_atomic_t& stop_signal,
                       StepTrace* trace, MetricsWriter* metrics);
  /// Logs on rank 0 which signal stops the run after `step`. It may have reached another rank only. All ranks must call
  /// it together.
  void tell_signal(int own_signal, std::int64_t step);
  /// Ends a run whose steps are all done. Validates if a signal has ended the last validation. Returns what run() does.
  int run_without_steps(const volatile std::sig_atomic_t& stop_signal);
  /// Finishes the oldest steps until `left` are under way.
  void finish_steps(std::size_t left, MetricsWriter* metrics);
  void save(std::int64_t step, bool is_last);
  /// Writes what rank 0 reports at the start of a run: run.json and changed keys.
  void write_start();
  MetricsOptions metrics_options() const;
  /// Loads the newest state, from disk or from memory, if there is one.
  void resume();
  /// Sets the keys of the initial weights to those that the run began with. It goes on from its own state, and what it
  /// writes must say how it began.
  void keep_initial_weights();
  /// Returns, on all ranks, the run that rank 0 has identified.
  RunIdentity share_run_identity();
  /// Compares and copies the state as far as it is due. No step may be under way.
  void guard_state(std::int64_t step, const StateGuard::Due& due, MetricsWriter* metrics);
  std::int64_t first_step() const { return 1 + resumed_.step; }
  bool is_first_rank() const { return ranks_.rank() == 0; }
  bool on_gpu() const { return step_.device() == Device::kCuda; }
  /// Returns the step's event for a reader of the state. It is null on CPUs.
  cuda::Event* state_read_done(StateReader reader) { return on_gpu() ? &step_.state_read_done(reader) : nullptr; }
  std::filesystem::path trace_folder() const { return dump_folder_ / config_.profiling.save_traces_folder; }
  /// Holds the memory that a rank's process takes, in bytes.
  struct RankMemory {
    MemoryPlan plan;
    std::size_t snapshot = 0;  // at most, the copy that a checkpoint is written from; on the host
    std::size_t copies = 0;    // copies in memory, on tmpfs
    std::size_t process = 0;   // resident before the plan's memory is allocated

    std::size_t total() const { return plan.total() + snapshot + copies + process; }
  };
  /// Returns the memory of every rank, by rank. All ranks must call it.
  std::vector<RankMemory> memory_of_ranks();
  void print_plan(const std::vector<RankMemory>& ranks) const;
  /// Throws Error if a machine or a GPU has less memory than the run needs there by the plan.
  void require_memory(const std::vector<RankMemory>& ranks) const;

  Ranks one_rank_;
  Ranks& ranks_;
  JobConfig config_;
  std::shared_ptr<cuda::Runtime> cuda_;  // null on CPUs
  std::shared_ptr<Mesh> mesh_;
  std::filesystem::path dump_folder_;
  std::optional<RunFolder> run_folder_;  // on rank 0 only
  TrainingData data_;
  TrainingStep step_;
  Checkpointer checkpointer_;
  StateGuard guard_;
  StepBatches batches_;
  ResumedFrom resumed_;  // step 0 if the run is new; its configuration is on rank 0 only
  TraceRecorder trace_;
  std::function<void(std::int64_t, const StepResult&)> step_callback_;
};

}  // namespace tessera
