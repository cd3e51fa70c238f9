// Causes a numerical fault on demand, to test what finds and repairs it. A gradient becomes NaN (debug.nan_at_step)
// after the gradients were summed over the ranks, so the fault is in this rank's shards only.
#pragma once

#include "config/job_config.h"
#include "model/model.h"

namespace tessera {

class FaultInjection {
 public:
  /// Both must outlive this.
  FaultInjection(const JobConfig& config, const Mesh& mesh) : config_(config), mesh_(mesh) {}

  /// Returns whether this rank is to make a gradient of the step NaN, which it is debug.nan_count times at most.
  bool hits(std::int64_t step);
  /// Makes a gradient NaN. The gradient norm is summed within a replica, so other replicas would not learn of it. On a
  /// GPU this also makes the sum of losses NaN, which all replicas share. On CPUs StepReduction tells them.
  static void poison(const Context& op, Model& model);

 private:
  const JobConfig& config_;
  const Mesh& mesh_;
  std::int64_t num_hits_ = 0;
};

}  // namespace tessera
