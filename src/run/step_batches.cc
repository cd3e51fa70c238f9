#include "run/step_batches.h"

#include "base/stopwatch.h"

namespace tessera {

void StepBatches::allocate(const TrainingStep& step, std::int64_t num_micro_batches) {
  batches_.resize(step.max_started());
  seconds_.resize(batches_.size());
  for (std::vector<Batch>& batches : batches_) {
    for (std::int64_t i = 0; i < num_micro_batches; ++i) batches.push_back(step.make_batch());
  }
  const Batch& batch = batches_.front().front();
  tokens_.resize(static_cast<std::size_t>(batch.num_seqs() * (batch.seq_len() + 1)));
}

void StepBatches::fill(Batch& batch, data::Loader& loader) {
  loader.next(tokens_);
  batch.fill(tokens_);
}

std::span<const Batch> StepBatches::load(std::int64_t step, data::Loader& loader, TraceRecorder* trace) {
  std::vector<Batch>& batches = batches_[slot(step)];
  const Stopwatch watch;
  {
    const TraceScope scope(trace, "data");
    for (Batch& batch : batches) fill(batch, loader);
  }
  seconds_[slot(step)] = watch.seconds();
  return batches;
}

const Batch& StepBatches::load_one(data::Loader& loader) {
  Batch& batch = batches_.front().front();
  fill(batch, loader);
  return batch;
}

}  // namespace tessera
