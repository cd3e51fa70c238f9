// The training loop: data, steps, validation, checkpoints, metrics.
#pragma once

#include <csignal>
#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>

#include "base/file_lock.h"
#include "checkpoint/checkpoint.h"
#include "data/loader.h"
#include "data/tokenizer.h"
#include "train/metrics.h"
#include "train/training_step.h"

namespace tessera {

class Trainer {
 public:
  /// Opens the data, plans and takes the memory, resumes from a checkpoint if there is one. Throws Error.
  explicit Trainer(JobConfig config);

  /// Trains to the last step, or until `stop_signal` is not 0: then the step at hand is finished and saved.
  /// Returns the signal, or 0.
  int run(const volatile std::sig_atomic_t& stop_signal);

  /// For tests: called after each step.
  void set_step_callback(std::function<void(std::int64_t, const StepResult&)> callback) {
    step_callback_ = std::move(callback);
  }
  Model& model() { return step_.model(); }

 private:
  std::vector<CheckpointFile> checkpoint_files();
  void save(std::int64_t step);
  void resume();
  void load_initial_weights();
  double validate();
  bool measures_sqnr(std::int64_t step) const;
  void print_plan() const;

  JobConfig config_;
  std::filesystem::path dump_folder_, checkpoint_folder_;
  std::optional<FileLock> lock_;                // of the folder
  std::unique_ptr<data::Tokenizer> tokenizer_;  // goes into checkpoints
  std::unique_ptr<data::Loader> loader_, validation_loader_;
  TrainingStep step_;
  std::vector<Batch> micro_batches_;
  std::vector<std::int32_t> tokens_;
  std::int64_t first_step_ = 1;
  TraceRecorder trace_;
  std::function<void(std::int64_t, const StepResult&)> step_callback_;
};

}  // namespace tessera
