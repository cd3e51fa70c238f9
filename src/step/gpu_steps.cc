#include "step/gpu_steps.h"

#include <algorithm>
#include <utility>

namespace tessera {

GpuSteps::Recorded& GpuSteps::recorded(const GraphKey& key, const cuda::Stream& stream) {
  auto found = std::ranges::find(recorded_, key, &Recorded::key);
  if (found == recorded_.end()) {
    if (recorded_.size() == max_graphs_) recorded_.pop_back();  // it is not the last step's, which may still run
    recorded_.push_front({.key = key, .graph = {}, .clock = PhaseClock(&stream)});
  } else {
    recorded_.splice(recorded_.begin(), recorded_, found);
  }
  return recorded_.front();
}

void GpuSteps::start_idle(const cuda::Stream& stream) {
  last_end_.record(stream);
  last_ended_ = Clock::now();
}

GpuSteps::Clock::time_point GpuSteps::end(cuda::Event& done) {
  const std::chrono::duration<double> since(done.seconds_since(last_end_));
  last_ended_ += std::chrono::duration_cast<Clock::duration>(since);
  std::swap(last_end_, done);
  return last_ended_;
}

}  // namespace tessera
