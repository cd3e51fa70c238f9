// Predicts a run on a cluster: its layout is planned without ranks, and its step is timed with the cluster's rates.
#pragma once

#include "plan/cluster.h"
#include "plan/routing_spread.h"
#include "plan/step_forecast.h"
#include "run/memory_advice.h"
#include "run/record/expert_loads.h"

namespace tessera {

/// Says how a plan takes tokens to choose experts.
struct Routing {
  Routing(RoutingKind kind_of_choices, const ExpertLoads* recorded = nullptr)
      : kind(kind_of_choices), loads(recorded) {}

  RoutingKind kind;          // decides how many ranks a token goes to
  const ExpertLoads* loads;  // the loads of experts; null: all are equal
};

struct RunForecast {
  StepForecast step;
  PipelineSchedule schedule;
  MemoryPlan memory;  // of the rank that takes most; without CUDA's own memory and NCCL's
  std::int64_t num_ranks = 1;
  double tokens = 0.0;          // of a step, of all ranks
  double seconds = 0.0;         // of a step, with the wait for the slowest GPU
  double flop_per_token = 0.0;  // TorchTitan's count
  double executed_flop = 0.0;   // of a step of the slowest rank, in products and attention
  /// How many times as long products and attention take because they leave SMs to links, by rank of the pipeline.
  std::vector<double> slowed_by_links;

  double tokens_per_second_per_gpu() const { return tokens / seconds / static_cast<double>(num_ranks); }
};

/// Sets expert_parallel_ranks_per_domain as a run on this cluster would choose it, if `direct` needs several domains
/// and the job leaves it open. Throws Error if a group's ranks cannot be cut into neighbours within domains.
void set_ranks_per_domain(JobConfig& job, std::int64_t num_ranks, const Cluster& cluster);

/// Predicts a step of the run. With recorded loads, an MoE layer takes as long as on the busiest of the ranks that
/// share its experts. `keeps_events` is StepTimes::keeps_events. Throws Error if the layout cannot be, or the cluster
/// has no kernels of that precision, fewer SMs, or no rate for an operator.
RunForecast forecast_run(const PlannedRun& run, const Cluster& cluster, const Routing& routing,
                         bool keeps_events = false);

/// Predicts a step of ranks that share this CPU. Throws Error if the calibration is of a GPU, of another number of
/// threads or ranks, or lacks a rate. Warns if it is of another version of this program.
RunForecast forecast_on_cpu(const JobConfig& job, const MeshDegrees& degrees, const Calibration& calibration);

/// Describes the load of a layer's busiest rank, divided by the mean of the ranks.
struct BusiestRank {
  std::string layer;  // that has the largest load
  double most = 1.0, mean = 1.0;
};
/// Returns the largest load of the run's MoE layers, and their mean. Throws Error if the loads are of another model.
BusiestRank busiest_rank(const ExpertLoads& loads, const JobConfig& job);

/// Returns what `routing` is in a run with this configuration, if nobody says otherwise.
RoutingKind default_routing(const JobConfig& job);

}  // namespace tessera
