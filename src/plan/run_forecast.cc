#include "plan/run_forecast.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <map>
#include <memory>
#include <ranges>
#include <set>

#include "base/version.h"
#include "comm/gpu_group.h"
#include "plan/operator_work.h"
#include "plan/precision_choice.h"
#include "plan/transfer_times.h"
#include "run/rank_setup.h"
#include "tensor/parallel.h"

namespace tessera {

RoutingKind default_routing(const JobConfig& job) {
  if (job.debug.moe_force_load_balance) return RoutingKind::kForced;
  return job.model.args.n_expert_groups > 1 ? RoutingKind::kGroups : RoutingKind::kUniform;
}

namespace {

std::string moe_layer_name(std::int64_t layer) { return fmt::format("layers.{}.moe", layer); }

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
    moe_layers_.resize(stages_of_rank_.size());
    for (int stage = 0; stage < schedule_.num_stages(); ++stage) stages_of_rank_[rank_of(stage)].push_back(stage);
    for (std::size_t pp = 0; pp < stages_of_rank_.size(); ++pp) {
      deferred_.push_back(most_deferred(schedule_, static_cast<int>(pp)));
      WorkOfRank of_rank{.stages = {},
                         .place_in_domain = static_cast<std::int64_t>(pp) * ranks_of_stage % cluster.gpus_per_domain};
      for (const int stage : stages_of_rank_[pp]) {
        const StageModules& has = modules[static_cast<std::size_t>(stage)];
        std::int64_t num_moe = 0;
        for (std::int64_t i = has.first_layer; i < has.first_layer + has.num_layers; ++i) {
          if (!model.is_moe_layer(i)) continue;
          ++num_moe;
          moe_layers_[pp].push_back(moe_layer_name(i));
        }
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
  /// Returns the names of a rank's MoE layers, without those of multi-token prediction.
  const std::vector<std::string>& moe_layers(std::size_t pp) const { return moe_layers_[pp]; }
  /// Returns how many links a rank has: to and from each rank that has a neighbour of one of its stages.
  int num_links(std::size_t pp) const {
    std::set<std::size_t> neighbours;
    for (int stage = 0; stage + 1 < schedule_.num_stages(); ++stage) {
      const std::size_t here = rank_of(stage), next = rank_of(stage + 1);
      if (here == pp) neighbours.insert(next);
      if (next == pp) neighbours.insert(here);
    }
    neighbours.erase(pp);
    return 2 * static_cast<int>(neighbours.size());
  }
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
  std::vector<int> held_, deferred_;                  // by stage, and by rank
  std::vector<std::vector<int>> stages_of_rank_;      // by rank
  std::vector<std::vector<std::string>> moe_layers_;  // by rank
  std::vector<WorkOfRank> work_of_rank_;
};

/// Predicts the parts of a step that the ranks of a pipeline have.
class RankForecasts {
 public:
  RankForecasts(const PlannedRun& run, const Cluster& cluster, const Routing& routing, bool keeps_events)
      : run_(run),
        cluster_(cluster),
        routing_(routing),
        keeps_events_(keeps_events),
        pipeline_(run, cluster),
        spread_(experts_spread(cluster, run.config, run.degrees, routing.kind)) {
    for (std::size_t pp = 0; pp < static_cast<std::size_t>(run.degrees.pp); ++pp) add(pp);
  }

  const PipelineSchedule& schedule() const { return pipeline_.schedule(); }
  const MemoryPlan& memory() const { return memory_; }
  const Model& whole_model() const { return planned_.front()->step.whole_model(); }
  std::vector<RankForecast> result() && { return std::move(ranks_); }

  /// Returns how many times as long products and attention of rank `pp` take because they leave SMs to its links.
  double slowed_by_links(std::size_t pp) const {
    const int of_links = pipeline_.num_links(pp) * cuda::GpuGroup::kSmsOfLink;
    if (cluster_.num_sms == 0) return 1.0;  // a CPU
    require(of_links < cluster_.num_sms, "{} has {} SMs, and the links of a pipeline need {}", cluster_.name,
            cluster_.num_sms, of_links);
    return static_cast<double>(cluster_.num_sms) / static_cast<double>(cluster_.num_sms - of_links);
  }

 private:
  /// Holds a rank that was planned. It stands for later ones that do the same and hold no more.
  struct Planned {
    std::size_t pp;
    std::int64_t rank;
    TrainingStep step;
  };

  void add(std::size_t pp) {
    const auto found = std::ranges::find_if(planned_, [&](const auto& other) {
      return pipeline_.does_the_same(pp, other->pp) && pipeline_.holds_as_much(pp, other->pp);
    });
    if (found == planned_.end()) {
      ranks_.push_back(fold(*planned_.emplace_back(plan(pp)), pp));
    } else {
      ranks_.push_back(routing_.loads == nullptr ? ranks_[(*found)->pp] : fold(**found, pp));
      ranks_.back().renumber(pipeline_.stages(pp));
    }
  }

  std::unique_ptr<Planned> plan(std::size_t pp) {
    const std::int64_t rank = static_cast<std::int64_t>(pp) * (run_.degrees.num_ranks() / run_.degrees.pp);
    const auto mesh = std::make_shared<Mesh>(Mesh::planned(run_.degrees, rank));
    auto planned =
        std::unique_ptr<Planned>(new Planned{pp, rank, TrainingStep(run_.config, mesh, schedule(), run_.device)});
    if (planned->step.memory_plan().total() > memory_.total()) memory_ = planned->step.memory_plan();
    return planned;
  }

  double busiest_rank(const std::string& layer) const {
    return routing_.loads->busiest_rank(layer, run_.config.model.args.num_experts, run_.degrees.ep);
  }

  /// Folds the record of a planned rank, with the loads of rank `pp`, for which it stands.
  RankForecast fold(const Planned& planned, std::size_t pp) const {
    const TransferTimes transfers(cluster_, run_.config, run_.degrees, planned.rank, spread_);
    const auto time_of = [this, slowed = slowed_by_links(pp)](const RecordedOperator& call) {
      OperatorTime time = cluster_.time_of(call);
      if (is_product_or_attention(call.name)) time.seconds *= slowed;
      return time;
    };
    StepTimes times{.of_operator = time_of,
                    .of_transfer = [&transfers](const RecordedTransfer& one) { return transfers.seconds(one); },
                    .seconds_per_operator = cluster_.calibration.seconds_per_operator,
                    .least_per_operator = cluster_.engine.host_seconds,
                    .overlap_cost = cluster_.overlap_cost,
                    .dispatch_overlap_cost = transfers.dispatch_overlap_cost(),
                    .overlaps_micro_batches = cluster_.engine.overlaps_micro_batches,
                    .is_far = [&transfers](const RecordedTransfer& one) { return transfers.is_far(one); },
                    .keeps_events = keeps_events_};
    std::map<std::string, double> loads;  // by the planned rank's layers
    if (routing_.loads != nullptr) {
      const std::vector<std::string>& layers = pipeline_.moe_layers(planned.pp);
      for (std::size_t i = 0; i < layers.size(); ++i) loads[layers[i]] = busiest_rank(pipeline_.moe_layers(pp)[i]);
      times.load_of = [&](const std::string& layer) {
        const auto known = loads.find(layer);
        return known != loads.end() ? known->second : busiest_rank(layer);  // of multi-token prediction
      };
    }
    const bool gathers_once = planned.step.model().options().keep_gathered;
    return forecast_rank(planned.step.dry_run(), schedule().num_micro_batches, gathers_once, times);
  }

  const PlannedRun& run_;
  const Cluster& cluster_;
  const Routing& routing_;
  bool keeps_events_;
  Pipeline pipeline_;
  RoutingSpread spread_;
  std::vector<std::unique_ptr<Planned>> planned_;
  std::vector<RankForecast> ranks_;
  MemoryPlan memory_;  // of the rank that takes most
};

}  // namespace

BusiestRank busiest_rank(const ExpertLoads& loads, const JobConfig& job) {
  const ModelConfig& model = job.model.args;
  require(model.num_moe_layers() > 0, "the loads are of experts, and this model has none");
  BusiestRank result{.layer = {}, .most = 1.0, .mean = 0.0};
  for (std::int64_t i = 0; i < model.n_layers; ++i) {
    if (model.is_moe_layer(i)) static_cast<void>(loads.of_layer(moe_layer_name(i)));  // throws Error if it has none
  }
  const auto layers = static_cast<std::int64_t>(loads.tokens.size());
  require(layers == model.num_moe_layers(), "'{}' has the loads of {} MoE layers, and the model has {}",
          loads.path.string(), layers, model.num_moe_layers());
  // The others are of multi-token prediction.
  for (const std::string& layer : std::views::keys(loads.tokens)) {
    const double load = loads.busiest_rank(layer, model.num_experts, job.parallelism.expert_parallel_degree);
    result.mean += load / static_cast<double>(layers);
    if (result.layer.empty() || load > result.most) result.layer = layer, result.most = load;
  }
  return result;
}

namespace {

/// Returns whether MXFP8 has blocks of 32. Hoppers multiply these on other units than blocks of 128, their default.
bool has_small_blocks(const std::optional<RecipeOptions>& options) {
  if (!options) return false;
  const BlockChoice shape = options->block_shape;
  const bool is_emulated = options->recipe == Recipe::kMxfp8Emulated && shape == BlockChoice::kOfRecipe;
  return is_emulated || shape == BlockChoice::k1x32 || shape == BlockChoice::k32x32;
}

/// Throws Error if the cluster's GPUs cannot make such a step, or if nobody knows how long its products take.
void check_kernels(const JobConfig& job, const MeshDegrees& degrees, const Cluster& cluster) {
  for (const std::string& precision : precisions_of_products(job)) {
    require(std::ranges::count(cluster.precisions, precision) > 0, "{} has no kernels for {}: '{}' lists {}",
            cluster.name, precision, cluster.path.string(), fmt::join(cluster.precisions, ", "));
  }
  const RecordedOperator product{
      .name = "grouped_linear_forward", .operands = {{{1, 1}, DType::kFloat8E4M3}}, .pass = {}};
  const bool is_calibrated =
      std::ranges::none_of(cluster.rules, [&](const OperatorRule& rule) { return rule.is_for(product); });
  const Recipes recipes = job.recipes();
  require(!is_calibrated || (!has_small_blocks(recipes.linear) && !has_small_blocks(recipes.grouped_mm)),
          "the rates of {} are of blocks of 128, and blocks of 32 are slower there: add an [[operator]] for such "
          "products to '{}', or set quantize.linear.mx.block_shape and quantize.grouped_mm.mx.block_shape to 128x128",
          cluster.name, cluster.path.string());
  const auto& parallelism = job.parallelism;
  const bool is_direct = parallelism.expert_parallel_comm_backend == DispatchBackend::kDirect;
  require(!is_direct || degrees.ep == 1 || parallelism.expert_parallel_num_sms < cluster.num_sms,
          "parallelism.expert_parallel_num_sms is {}, and a GPU of {} has {} SMs", parallelism.expert_parallel_num_sms,
          cluster.name, cluster.num_sms);
}

}  // namespace

void set_ranks_per_domain(JobConfig& job, std::int64_t num_ranks, const Cluster& cluster) {
  auto& parallelism = job.parallelism;
  const std::int64_t ep = parallelism.expert_parallel_degree;
  const bool is_direct = parallelism.expert_parallel_comm_backend == DispatchBackend::kDirect;
  if (!is_direct || ep == 1 || parallelism.expert_parallel_ranks_per_domain > 0) return;
  std::vector<int> domain_of_rank;
  for (std::int64_t rank = 0; rank < num_ranks; ++rank) {
    domain_of_rank.push_back(static_cast<int>(rank / cluster.gpus_per_domain));
  }
  const std::int64_t most = max_ranks_per_domain(domain_of_rank, ep);
  if (most == ep) return;
  require(most > 1,
          "parallelism.expert_parallel_comm_backend is direct, but groups of {} ranks cannot be cut into neighbours in "
          "domains of {} GPUs",
          ep, cluster.gpus_per_domain);
  parallelism.expert_parallel_ranks_per_domain = most;
}

RunForecast forecast_run(const PlannedRun& run, const Cluster& cluster, const Routing& routing, bool keeps_events) {
  const JobConfig& job = run.config;
  if (!cluster.precisions.empty()) check_kernels(job, run.degrees, cluster);
  RunForecast result;
  result.num_ranks = run.degrees.num_ranks();
  RankForecasts ranks(run, cluster, routing, keeps_events);
  result.flop_per_token = flop_per_token(job.model.args, ranks.whole_model().count_parameters(), job.training.seq_len);
  result.memory = ranks.memory();
  result.schedule = ranks.schedule();
  for (std::int64_t pp = 0; pp < run.degrees.pp; ++pp) {
    result.slowed_by_links.push_back(ranks.slowed_by_links(static_cast<std::size_t>(pp)));
  }
  result.step = forecast_step(std::move(ranks).result(), result.schedule);
  result.seconds = result.step.seconds * cluster.slowest_of(result.num_ranks);
  const std::int64_t data_ranks = run.degrees.dp_replicate * run.degrees.dp_shard;
  result.tokens = static_cast<double>(job.sequences_per_step(data_ranks) * job.training.seq_len);
  for (const ForecastLine& line : result.step.ranks[result.step.slowest].lines) result.executed_flop += line.flop;
  return result;
}

RunForecast forecast_on_cpu(const JobConfig& job, const MeshDegrees& degrees, const Calibration& calibration) {
  require(calibration.threads > 0, "'{}' has the rates of a GPU, {}", calibration.path.string(), calibration.machine);
  const auto num_ranks = static_cast<int>(degrees.num_ranks());
  const Cluster cluster = cluster_of_cpus(calibration, num_ranks);
  const int of_rank = num_ranks == 1 ? num_threads() : std::max(1, num_cores() / num_ranks);
  const int threads = job.training.num_threads > 0 ? static_cast<int>(job.training.num_threads) : of_rank;
  require(calibration.threads == threads, "'{}' was measured on {} threads, and this run has {} (training.num_threads)",
          calibration.path.string(), calibration.threads, threads);
  if (calibration.program != version()) {
    spdlog::warn("'{}' was measured with tessera {}, and this is {}: `{}` measures again", calibration.path.string(),
                 calibration.program, version(), calibration.command());
  }
  return forecast_run({job, Device::kCpu, degrees}, cluster, default_routing(job));
}

}  // namespace tessera
