// Measures what several ranks of a node do to each other: how fast they exchange tensors, what products lose beside
// transfers (κ), and how much the slowest rank lags behind (σ).
#pragma once

#include <span>
#include <string>
#include <vector>

#include "comm/process_group.h"
#include "ops/runtime/runtime.h"
#include "plan/calibration.h"

namespace tessera {

/// Returns the values, without their date. `runtime` is null if the ranks compute on CPUs. All ranks of `world`, two or
/// more of one node, must call this together. They get the same values.
std::vector<RankValue> calibrate_ranks(ProcessGroup& world, cuda::Runtime* runtime);

/// Returns the bytes that a rank's link carries in each direction, in a transfer between n ranks. `kind` is one of
/// kTransferKinds, and `bytes` those of the whole tensor.
double bytes_of_link(const std::string& kind, double bytes, double n);

/// Returns the part of a call's duration that products beside it lose, from 0 to 1. The call takes `of_call` seconds.
/// The products take `alone` seconds without it, and `beside` with it.
double lost_part(double of_call, double alone, double beside);

/// Returns the time of the slowest rank as a multiple of the mean. `seconds` has the time of each rank.
double slowest_over_mean(std::span<const double> seconds);

/// Returns σ, the relative standard deviation of the ranks' times. Cluster::slowest_of() makes slowest_over_mean() of
/// it. `seconds` has the times of two or more ranks.
double straggler_of(std::span<const double> seconds);

}  // namespace tessera
