// The micro-batches of all steps that may be under way. Each step has its own until it is finished.
#pragma once

#include <span>
#include <vector>

#include "data/loader.h"
#include "step/training_step.h"
#include "system/trace.h"

namespace tessera {

class StepBatches {
 public:
  /// Allocates `num_micro_batches` for each step of `step` that may be started and not finished.
  void allocate(const TrainingStep& step, std::int64_t num_micro_batches);

  /// Fills the batches of step number `step` with what comes next from the loader. They belong to the step until number
  /// `step` + max_started() is loaded. `trace`, if given, gets the time.
  std::span<const Batch> load(std::int64_t step, data::Loader& loader, TraceRecorder* trace);
  /// Returns how long load() took for a step.
  double seconds(std::int64_t step) const { return seconds_[slot(step)]; }
  /// Fills a batch with what comes next from the loader. No step may be under way.
  const Batch& load_one(data::Loader& loader);

 private:
  std::size_t slot(std::int64_t step) const { return static_cast<std::size_t>(step) % batches_.size(); }
  void fill(Batch& batch, data::Loader& loader);

  std::vector<std::vector<Batch>> batches_;  // by slot
  std::vector<double> seconds_;              // by slot
  std::vector<std::int32_t> tokens_;         // of one micro-batch
};

}  // namespace tessera
