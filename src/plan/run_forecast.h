// Predicts a run on a cluster: its layout is planned without ranks, and its step is timed with the cluster's rates.
#pragma once

#include "plan/cluster.h"
#include "plan/routing_spread.h"
#include "plan/step_forecast.h"
#include "run/memory_advice.h"

namespace tessera {

struct RunForecast {
  StepForecast step;
  PipelineSchedule schedule;
  MemoryPlan memory;  // of the rank that takes most; without CUDA's own memory and NCCL's
  std::int64_t num_ranks = 1;
  double tokens = 0.0;          // of a step, of all ranks
  double seconds = 0.0;         // of a step, with the wait for the slowest GPU
  double flop_per_token = 0.0;  // TorchTitan's count
  double executed_flop = 0.0;   // of a step of the slowest rank, in products and attention

  double tokens_per_second_per_gpu() const { return tokens / seconds / static_cast<double>(num_ranks); }
};

/// Predicts a step of the run. `keeps_events` is StepTimes::keeps_events. Throws Error if the layout cannot be, or the
/// cluster lacks a rate.
RunForecast forecast_run(const PlannedRun& run, const Cluster& cluster, RoutingKind routing, bool keeps_events = false);

/// Predicts a step of one rank on this CPU. Throws Error if the calibration is of a GPU, of another number of threads,
/// or lacks a rate. Warns if it is of another version of this program.
StepForecast forecast_on_cpu(const JobConfig& job, const Calibration& calibration);

/// Returns what `routing` is in a run with this configuration, if nobody says otherwise.
RoutingKind default_routing(const JobConfig& job);

}  // namespace tessera
