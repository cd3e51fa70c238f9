// Training steps on random tokens, whose speed is measured. A few token ids are frequent, so that there is something to
// learn.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ops/runtime/kernel_profile.h"
#include "step/training_step.h"
#include "tensor/philox.h"

namespace tessera {

/// Gives the runs of a step whose operators were launched one by one the durations that they had when the same step was
/// replayed as a graph just before. Launches one by one may leave a GPU idle in between. It then uses less power, and
/// has a higher clock than in a step. `runs` are those of all profiled steps, ordered by their begin. The first one
/// with a region (KernelRun::region) is of the last step's first operator. Copies keep their durations, because those
/// of tokens may run at any time. Returns false and changes nothing if the steps before had other runs.
bool take_durations_of_replay(std::span<cuda::KernelRun> runs);

class RandomSteps {
 public:
  /// Each data rank draws tokens of its own. `step` has been allocated.
  RandomSteps(TrainingStep& step, const JobConfig& config, const Mesh& mesh);

  /// Starts the next step.
  void start();
  /// Makes one step.
  StepResult run() {
    start();
    return step_.finish();
  }

  struct Timed {
    std::vector<RecordedOperator> operators;  // of a step, with their durations
    double other_seconds = 0.0;               // of what a GPU ran besides operators: transfers and copies
    double step_seconds = 0.0;
  };
  /// Makes steps, and returns the median of each time. On a GPU, one step is timed as it runs in training, and CUPTI
  /// times the operators of a later one. If steps are graphs, operators get the durations of a replay. Both come after
  /// steps that keep the GPU busy until its clock is that of a long run. No step may have been started. Operands are
  /// those of the first step: with the standard backend on CPUs, steps differ in the rows of experts. Throws Error if
  /// there is no CUPTI.
  Timed time_operators(int num_steps);

 private:
  /// Starts a step, and before it makes others until a GPU's clock has settled. Ranks that train together make one step
  /// only, because they must make the same number.
  void start_settled();
  Timed time_once();

  TrainingStep& step_;
  Philox random_;
  double vocab_size_;
  bool is_alone_;  // no other rank takes part in the steps
  std::uint64_t num_drawn_ = 0;
  std::int64_t num_started_ = 0;
  std::vector<std::vector<Batch>> batches_;  // of the steps that may be started
  std::vector<std::int32_t> tokens_;         // of a micro-batch
};

}  // namespace tessera
