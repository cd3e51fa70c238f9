// Where the memory of a run goes, in every mode of recomputation; and what to say when it does not fit.
#pragma once

#include <string>

#include "train/training_step.h"

namespace tessera {

/// Of a run of one rank with another mode and local batch, and as many sequences per step. Measures it; allocates
/// nothing, and needs no GPU for kCuda, which it takes for a Hopper.
MemoryPlan memory_plan(const JobConfig& config, Device device, Recompute mode, std::int64_t local_batch_size);

/// For a run of one rank that would take `plan` and `others` bytes besides it, on a device with `available` bytes: a
/// table of its memory, and the nearest settings that fit, if any do. Measures other settings' steps; allocates
/// nothing.
std::string memory_advice(const JobConfig& config, Device device, const MemoryPlan& plan, std::size_t others,
                          std::size_t available);

}  // namespace tessera
