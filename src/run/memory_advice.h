// Plans where the memory of a run goes, in every mode of activation recomputation, and advises what to change if it
// does not fit. The run may have any number of ranks, which need not exist: measuring does not communicate.
#pragma once

#include <string>
#include <vector>

#include "step/training_step.h"

namespace tessera {

struct PlannedRun {
  const JobConfig& config;
  Device device = Device::kCpu;        // kCuda needs no GPU; without one the plan assumes a Hopper
  MeshDegrees degrees{.dp_shard = 1};  // resolved
};

/// Plans one rank with another mode and micro-batch, but as many sequences per step. It allocates nothing.
MemoryPlan memory_plan(const PlannedRun& run, std::int64_t rank, Recompute mode, std::int64_t micro_batch_size);

/// Returns the plans of a pipeline's ranks, stage by stage. All ranks of one stage have the same plan.
std::vector<MemoryPlan> memory_plans(const PlannedRun& run, Recompute mode, std::int64_t micro_batch_size);

/// Returns advice for a run that does not fit. Each rank has `available` bytes, of which `others` are needed besides
/// the step. The text has a table of a rank's memory and the nearest settings that fit, if there are any. In a
/// pipeline, the table is of the rank that needs most.
std::string memory_advice(const PlannedRun& run, std::size_t others, std::size_t available);

}  // namespace tessera
