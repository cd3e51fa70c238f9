#include "plan/run_forecast.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <memory>

#include "base/version.h"
#include "plan/transfer_times.h"
#include "tensor/parallel.h"

namespace tessera {

StepForecast forecast_on_cpu(const JobConfig& job, const Calibration& calibration) {
  require(calibration.threads > 0, "'{}' has the rates of a GPU, {}", calibration.path.string(), calibration.machine);
  const int threads = job.training.num_threads > 0 ? static_cast<int>(job.training.num_threads) : num_threads();
  require(calibration.threads == threads, "'{}' was measured on {} threads, and this run has {} (training.num_threads)",
          calibration.path.string(), calibration.threads, threads);
  if (calibration.program != version()) {
    spdlog::warn("'{}' was measured with tessera {}, and this is {}: `tessera bench calibrate` measures again",
                 calibration.path.string(), calibration.program, version());
  }
  const TrainingStep step(job);
  const StepTimes times{.of_operator = [&](const RecordedOperator& call) { return calibration.time_of(call); },
                        .of_transfer = {},
                        .seconds_per_operator = calibration.seconds_per_operator};
  return forecast_step({.dry_runs = {&step.dry_run()}, .schedule = job.pipeline_schedule({.dp_shard = 1})},
                       std::span(&times, 1));
}

RoutingKind default_routing(const JobConfig& job) {
  if (job.debug.moe_force_load_balance) return RoutingKind::kForced;
  return job.model.args.n_expert_groups > 1 ? RoutingKind::kGroups : RoutingKind::kUniform;
}

RunForecast forecast_run(const PlannedRun& run, const Cluster& cluster, RoutingKind routing) {
  const JobConfig& job = run.config;
  const std::int64_t num_ranks = run.degrees.num_ranks(), ranks_of_stage = num_ranks / run.degrees.pp;
  RunForecast result;
  result.num_ranks = num_ranks;
  ForecastInput input;
  input.schedule = job.pipeline_schedule(run.degrees);
  std::vector<std::unique_ptr<TrainingStep>> steps;
  std::vector<std::unique_ptr<TransferTimes>> transfers;
  std::vector<StepTimes> times;
  const RoutingSpread spread = experts_spread(cluster, job, run.degrees, routing);
  for (std::int64_t pp = 0; pp < run.degrees.pp; ++pp) {
    const std::int64_t rank = pp * ranks_of_stage;
    const auto mesh = std::make_shared<Mesh>(Mesh::planned(run.degrees, rank));
    input.gathers_once = model_options(job, mesh, run.device).keep_gathered;
    steps.push_back(std::make_unique<TrainingStep>(job, mesh, run.device));
    const TrainingStep& step = *steps.back();
    input.dry_runs.push_back(&step.dry_run());
    if (step.memory_plan().total() > result.memory.total()) result.memory = step.memory_plan();
    transfers.push_back(std::make_unique<TransferTimes>(cluster, job, run.degrees, rank, spread));
    times.push_back({.of_operator = [&cluster](const RecordedOperator& call) { return cluster.time_of(call); },
                     .of_transfer = [&of = *transfers.back()](const RecordedTransfer& one) { return of.seconds(one); },
                     .overlap_cost = cluster.overlap_cost,
                     .dispatch_overlap_cost = transfers.back()->dispatch_overlap_cost()});
  }
  result.step = forecast_step(input, times);
  result.seconds = result.step.seconds * cluster.slowest_of(num_ranks);
  const std::int64_t data_ranks = run.degrees.dp_replicate * run.degrees.dp_shard;
  result.tokens = static_cast<double>(job.sequences_per_step(data_ranks) * job.training.seq_len);
  result.flop_per_token =
      flop_per_token(job.model.args, steps.front()->whole_model().count_parameters(), job.training.seq_len);
  for (const ForecastLine& line : result.step.ranks[result.step.slowest].lines) result.executed_flop += line.flop;
  return result;
}

}  // namespace tessera
