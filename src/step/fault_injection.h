// Causes a numerical fault on demand, to test what finds and repairs it. A gradient becomes NaN (debug.nan_at_step).
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
  /// Makes a gradient NaN. On a GPU it also makes the sum of losses NaN. On CPUs the other replicas learn of the fault
  /// by the norm.
  static void poison(const Context& op, Model& model);

 private:
  const JobConfig& config_;
  const Mesh& mesh_;
  std::int64_t num_hits_ = 0;
};

}  // namespace tessera
