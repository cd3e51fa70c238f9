// What to say when a run does not fit: where its memory goes, in every mode of recomputation, and what would fit.
#pragma once

#include <string>

#include "train/training_step.h"

namespace tessera {

/// For a run of one rank that would take `plan` and `others` bytes besides it, on a device with `available` bytes: a
/// table of its memory, and the nearest settings that fit, if any do. Measures other settings' steps; allocates
/// nothing.
std::string memory_advice(const JobConfig& config, Device device, const MemoryPlan& plan, std::size_t others,
                          std::size_t available);

}  // namespace tessera
