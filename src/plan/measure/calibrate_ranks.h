// Measures what several ranks of a node do to each other: how fast they exchange tensors, what products lose beside
// transfers (κ), and how much the slowest rank lags behind (σ).
#pragma once

#include <vector>

#include "comm/process_group.h"
#include "ops/runtime/runtime.h"
#include "plan/calibration.h"

namespace tessera {

/// Returns the values, without their date. `runtime` is null if the ranks compute on CPUs. All ranks of `world`, two or
/// more of one node, must call this together. They get the same values.
std::vector<RankValue> calibrate_ranks(ProcessGroup& world, cuda::Runtime* runtime);

}  // namespace tessera
