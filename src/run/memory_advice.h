// Where the memory of a run goes, in every mode of recomputation; and what to say when it does not fit. Of a run of any
// number of ranks, which need not be there: measuring communicates with nobody.
#pragma once

#include <string>
#include <vector>

#include "step/training_step.h"

namespace tessera {

struct PlannedRun {
  const JobConfig& config;
  Device device = Device::kCpu;        // kCuda needs no GPU: without one it is taken for a Hopper
  MeshDegrees degrees{.dp_shard = 1};  // resolved
};

/// Plans one rank with another mode and micro-batch, and as many sequences per step. It allocates nothing.
MemoryPlan memory_plan(const PlannedRun& run, std::int64_t rank, Recompute mode, std::int64_t micro_batch_size);

/// Returns the plans of the ranks of a pipeline, one behind the other. All ranks of one stage are alike.
std::vector<MemoryPlan> memory_plans(const PlannedRun& run, Recompute mode, std::int64_t micro_batch_size);

/// For a run whose ranks have `available` bytes each, of which `others` are taken by what is besides the step, and that
/// does not fit: a table of a rank's memory, of a pipeline that rank's which takes most, and the nearest settings that
/// fit, if any do.
std::string memory_advice(const PlannedRun& run, std::size_t others, std::size_t available);

}  // namespace tessera
