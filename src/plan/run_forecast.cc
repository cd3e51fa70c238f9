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
  const PipelineSchedule schedule = job.pipeline_schedule({.dp_shard = 1});
  return forecast_step({forecast_rank(step.dry_run(), schedule.num_micro_batches, false, times)}, schedule);
}

RoutingKind default_routing(const JobConfig& job) {
  if (job.debug.moe_force_load_balance) return RoutingKind::kForced;
  return job.model.args.n_expert_groups > 1 ? RoutingKind::kGroups : RoutingKind::kUniform;
}

namespace {

/// Describes what a rank of the pipeline has, so that ranks with the same description do the same work.
struct WorkOfRank {
  struct Stage {
    bool has_embedding, has_head, is_fed_here, feeds_here;  // here: the stage before, or after, is on the same rank
    std::int64_t num_dense_layers, num_moe_layers;
    bool operator==(const Stage&) const = default;
  };
  std::vector<Stage> stages;
  std::int64_t place_in_domain;  // which decides what of its groups is in its domain
  bool operator==(const WorkOfRank&) const = default;
};

class Pipeline {
 public:
  Pipeline(const PlannedRun& run, const Cluster& cluster)
      : schedule_(run.config.pipeline_schedule(run.degrees)), held_(most_held(schedule_)) {
    const ModelConfig& model = run.config.model.args;
    const std::vector<StageModules> modules = run.config.pipeline_stages(run.degrees);
    const std::int64_t ranks_of_stage = run.degrees.num_ranks() / run.degrees.pp;
    stages_of_rank_.resize(static_cast<std::size_t>(run.degrees.pp));
    for (int stage = 0; stage < schedule_.num_stages(); ++stage) stages_of_rank_[rank_of(stage)].push_back(stage);
    for (std::size_t pp = 0; pp < stages_of_rank_.size(); ++pp) {
      deferred_.push_back(most_deferred(schedule_, static_cast<int>(pp)));
      WorkOfRank of_rank{.stages = {},
                         .place_in_domain = static_cast<std::int64_t>(pp) * ranks_of_stage % cluster.gpus_per_domain};
      for (const int stage : stages_of_rank_[pp]) {
        const StageModules& has = modules[static_cast<std::size_t>(stage)];
        std::int64_t num_moe = 0;
        for (std::int64_t i = 0; i < has.num_layers; ++i) num_moe += model.is_moe_layer(has.first_layer + i) ? 1 : 0;
        of_rank.stages.push_back({has.embedding, has.head, stage > 0 && rank_of(stage - 1) == pp,
                                  stage + 1 < schedule_.num_stages() && rank_of(stage + 1) == pp,
                                  has.num_layers - num_moe, num_moe});
      }
      work_of_rank_.push_back(std::move(of_rank));
    }
  }

  const PipelineSchedule& schedule() const { return schedule_; }
  /// Returns the numbers of a rank's stages.
  const std::vector<int>& stages(std::size_t pp) const { return stages_of_rank_[pp]; }
  /// Says whether both ranks do the same work.
  bool does_the_same(std::size_t pp, std::size_t other) const { return work_of_rank_[pp] == work_of_rank_[other]; }
  /// Says whether rank `other` defers at least as many backwards as rank `pp`, and holds at least as many micro-batches
  /// in each stage.
  bool holds_as_much(std::size_t pp, std::size_t other) const {
    return deferred_[pp] <= deferred_[other] &&
           std::ranges::equal(stages_of_rank_[pp], stages_of_rank_[other], [&](int a, int b) {
             return held_[static_cast<std::size_t>(a)] <= held_[static_cast<std::size_t>(b)];
           });
  }

 private:
  std::size_t rank_of(int stage) const {
    return static_cast<std::size_t>(schedule_.rank_of_stage[static_cast<std::size_t>(stage)]);
  }

  PipelineSchedule schedule_;
  std::vector<int> held_, deferred_;              // by stage, and by rank
  std::vector<std::vector<int>> stages_of_rank_;  // by rank
  std::vector<WorkOfRank> work_of_rank_;
};

}  // namespace

RunForecast forecast_run(const PlannedRun& run, const Cluster& cluster, RoutingKind routing, bool keeps_events) {
  const JobConfig& job = run.config;
  const std::int64_t num_ranks = run.degrees.num_ranks(), ranks_of_stage = num_ranks / run.degrees.pp;
  RunForecast result;
  result.num_ranks = num_ranks;
  const Pipeline pipeline(run, cluster);
  const RoutingSpread spread = experts_spread(cluster, job, run.degrees, routing);
  std::vector<RankForecast> ranks(static_cast<std::size_t>(run.degrees.pp));
  std::vector<std::size_t> planned;
  // A planned rank stands for later ones that do the same and hold no more.
  for (std::size_t pp = 0; pp < ranks.size(); ++pp) {
    const auto stands_for_it = [&](std::size_t other) {
      return pipeline.does_the_same(pp, other) && pipeline.holds_as_much(pp, other);
    };
    const auto found = std::ranges::find_if(planned, stands_for_it);
    if (found != planned.end()) {
      ranks[pp] = ranks[*found];
      ranks[pp].renumber(pipeline.stages(pp));
      continue;
    }
    planned.push_back(pp);
    const std::int64_t rank = static_cast<std::int64_t>(pp) * ranks_of_stage;
    const auto mesh = std::make_shared<Mesh>(Mesh::planned(run.degrees, rank));
    const TrainingStep step(job, mesh, pipeline.schedule(), run.device);
    if (step.memory_plan().total() > result.memory.total()) result.memory = step.memory_plan();
    const TransferTimes transfers(cluster, job, run.degrees, rank, spread);
    const StepTimes times{.of_operator = [&cluster](const RecordedOperator& call) { return cluster.time_of(call); },
                          .of_transfer = [&transfers](const RecordedTransfer& one) { return transfers.seconds(one); },
                          .seconds_per_operator = cluster.calibration.seconds_per_operator,
                          .least_per_operator = cluster.engine.host_seconds,
                          .overlap_cost = cluster.overlap_cost,
                          .dispatch_overlap_cost = transfers.dispatch_overlap_cost(),
                          .overlaps_micro_batches = cluster.engine.overlaps_micro_batches,
                          .is_far = [&transfers](const RecordedTransfer& one) { return transfers.is_far(one); },
                          .keeps_events = keeps_events};
    const bool gathers_once = step.model().options().keep_gathered;
    ranks[pp] = forecast_rank(step.dry_run(), pipeline.schedule().num_micro_batches, gathers_once, times);
    if (pp == 0) {
      result.flop_per_token =
          flop_per_token(job.model.args, step.whole_model().count_parameters(), job.training.seq_len);
    }
  }
  result.step = forecast_step(std::move(ranks), pipeline.schedule());
  result.schedule = pipeline.schedule();
  result.seconds = result.step.seconds * cluster.slowest_of(num_ranks);
  const std::int64_t data_ranks = run.degrees.dp_replicate * run.degrees.dp_shard;
  result.tokens = static_cast<double>(job.sequences_per_step(data_ranks) * job.training.seq_len);
  for (const ForecastLine& line : result.step.ranks[result.step.slowest].lines) result.executed_flop += line.flop;
  return result;
}

}  // namespace tessera
