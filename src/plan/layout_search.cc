#include "plan/layout_search.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <future>
#include <mutex>
#include <numeric>
#include <optional>

namespace tessera {
namespace {

struct Degrees {
  std::int64_t pp, tp, ep;
};

/// This many degrees, the fastest in the first round, are tried with all schedules, modes and micro-batches.
constexpr std::size_t kKept = 12;

constexpr std::int64_t kMicroBatches[] = {1, 2, 4};  // sequences
// Modes are in the order of the memory that they take. The first schedule takes least.
constexpr Recompute kModes[] = {Recompute::kFull, Recompute::kSelective, Recompute::kNone};
constexpr PipelineScheduleKind kSchedules[] = {PipelineScheduleKind::k1F1B, PipelineScheduleKind::kInterleaved1F1B,
                                               PipelineScheduleKind::kZBV, PipelineScheduleKind::kDualPipeV};

std::vector<Degrees> degrees_of(const LayoutSearch& search) {
  const ModelConfig& model = search.job.model.args;
  const std::int64_t ranks = search.num_ranks, experts = model.num_moe_layers() > 0 ? model.num_experts : 1;
  std::vector<Degrees> all;
  for (std::int64_t pp = 1; pp <= std::min(ranks, model.n_layers); pp *= 2) {
    if (ranks % pp != 0) continue;
    for (std::int64_t tp = 1; tp <= std::min<std::int64_t>(search.cluster.gpus_per_domain, model.n_heads); tp *= 2) {
      if (ranks / pp % tp != 0) continue;
      for (std::int64_t ep = 1; ep <= experts; ep *= 2) {
        if (ranks / pp % ep != 0 || experts % ep != 0) continue;
        all.push_back({pp, tp, ep});
      }
    }
  }
  return all;
}

JobConfig config_of(const LayoutSearch& search, const Degrees& degrees, std::int64_t micro_batch,
                    std::int64_t sequences) {
  JobConfig config = search.job;
  auto& parallelism = config.parallelism;
  parallelism.pipeline_parallel_degree = degrees.pp;
  parallelism.tensor_parallel_degree = degrees.tp;
  parallelism.expert_parallel_degree = degrees.ep;
  parallelism.expert_parallel_ranks_per_domain = 0;
  if (degrees.ep > search.cluster.gpus_per_domain &&
      parallelism.expert_parallel_comm_backend == DispatchBackend::kDirect) {
    parallelism.expert_parallel_ranks_per_domain = search.cluster.gpus_per_domain;
  }
  config.training.global_batch_size = sequences;
  config.training.local_batch_size = parallelism.pipeline_parallel_microbatch_size = micro_batch;
  return config;
}

/// Returns the sequences of a step, which all layouts share. Throws Error if neither global_batch_size nor the job's
/// own degrees say how many they are.
std::int64_t sequences_of(const LayoutSearch& search) {
  if (search.job.training.global_batch_size > 0) return search.job.training.global_batch_size;
  const MeshDegrees degrees = resolve(search.job.mesh_degrees(), search.num_ranks);
  return search.job.sequences_per_step(degrees.dp_replicate * degrees.dp_shard);
}

/// Plans layouts, from several threads.
class Searcher {
 public:
  explicit Searcher(const LayoutSearch& search) : search_(search), sequences_(sequences_of(search)) {}

  /// Tries the degrees in the way that takes least memory. Returns the tokens per second and GPU, or 0 if that is not
  /// possible or does not fit.
  double try_plainly(const Degrees& degrees) {
    JobConfig config = config_of(search_, degrees, 1, sequences_);
    config.parallelism.pipeline_parallel_schedule = name_of(PipelineScheduleKind::k1F1B);
    config.activation_checkpoint.mode = Recompute::kFull;
    const std::optional<FoundLayout> layout = plan(config);
    return layout ? layout->tokens_per_second_per_gpu : 0.0;
  }

  /// Adds all layouts with these degrees and micro-batches that fit.
  void try_all(const Degrees& degrees, std::int64_t micro_batch) {
    for (const PipelineScheduleKind kind : kSchedules) {
      JobConfig config = config_of(search_, degrees, micro_batch, sequences_);
      config.parallelism.pipeline_parallel_schedule = name_of(kind);
      bool fits_any = false;
      for (const Recompute mode : kModes) {
        config.activation_checkpoint.mode = mode;
        std::optional<FoundLayout> layout = plan(config);
        if (!layout) break;
        fits_any = true;
        const std::scoped_lock lock(mutex_);
        found_.fitting.push_back(std::move(*layout));
      }
      if (degrees.pp == 1 || (kind == PipelineScheduleKind::k1F1B && !fits_any)) return;
    }
  }

  FoundLayouts result() && {
    require(!found_.fitting.empty() || found_.num_too_large > 0, "no layout is possible: {}", first_error_);
    std::ranges::sort(found_.fitting, [](const FoundLayout& a, const FoundLayout& b) {
      return std::pair(-a.tokens_per_second_per_gpu, a.memory_bytes) <
             std::pair(-b.tokens_per_second_per_gpu, b.memory_bytes);
    });
    return std::move(found_);
  }

 private:
  /// Returns nothing if the layout is not possible, or does not fit.
  std::optional<FoundLayout> plan(const JobConfig& config) {
    try {
      config.validate();
      const MeshDegrees degrees = resolve(config.mesh_degrees(), search_.num_ranks);
      config.validate_on(degrees);
      const RunForecast forecast = forecast_run({config, search_.device, degrees}, search_.cluster, search_.routing);
      const double memory = static_cast<double>(forecast.memory.total()) + search_.cluster.reserved_bytes;
      if (memory <= search_.cluster.memory_bytes) {
        const double bubble = forecast.step.ranks[forecast.step.slowest].bubble_seconds;
        return FoundLayout{.config = config,
                           .tokens_per_second_per_gpu = forecast.tokens_per_second_per_gpu(),
                           .memory_bytes = memory,
                           .bubble = bubble / forecast.seconds};
      }
      const std::scoped_lock lock(mutex_);
      ++found_.num_too_large;
    } catch (const MissingRate&) {
      throw;
    } catch (const Error& error) {
      const std::scoped_lock lock(mutex_);
      if (first_error_.empty()) first_error_ = error.what();
    }
    return std::nullopt;
  }

  const LayoutSearch& search_;
  std::int64_t sequences_;
  std::mutex mutex_;
  FoundLayouts found_;
  std::string first_error_;
};

}  // namespace

FoundLayouts search_layouts(const LayoutSearch& search) {
  const std::vector<Degrees> all = degrees_of(search);
  Searcher searcher(search);
  /// Calls work(i) for each i below `count`, from all threads.
  const auto for_each = [&](std::size_t count, const auto& work) {
    std::atomic<std::size_t> next = 0;
    const auto run = [&] {
      for (std::size_t i = next++; i < count; i = next++) work(i);
    };
    std::vector<std::future<void>> others;
    for (int i = 1; i < search.num_threads; ++i) others.push_back(std::async(std::launch::async, run));
    run();
    for (std::future<void>& other : others) other.get();
  };
  std::vector<double> rates(all.size());
  for_each(all.size(), [&](std::size_t i) { rates[i] = searcher.try_plainly(all[i]); });
  std::vector<std::size_t> order(all.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::erase_if(order, [&](std::size_t i) { return rates[i] == 0.0; });
  std::ranges::stable_sort(order, std::greater(), [&](std::size_t i) { return rates[i]; });
  order.resize(std::min(order.size(), kKept));
  const auto num_batches = static_cast<std::size_t>(std::size(kMicroBatches));
  for_each(order.size() * num_batches,
           [&](std::size_t i) { searcher.try_all(all[order[i / num_batches]], kMicroBatches[i % num_batches]); });
  return std::move(searcher).result();
}

std::vector<Sensitivity> sensitivities(const PlannedRun& run, const Cluster& cluster, RoutingKind routing) {
  constexpr double kFaster = 1.1;
  using Change = std::pair<const char*, void (*)(Cluster&)>;
  const Change changes[] = {
      {"products and attention 10 % faster", [](Cluster& c) { c.scale_rates(kFaster, 1.0); }},
      {"memory 10 % faster", [](Cluster& c) { c.scale_rates(1.0, kFaster); }},
      {"NVLink twice as fast",
       [](Cluster& c) {
         c.domain_bytes_per_second *= 2.0;
         c.direct_bytes_per_second *= 2.0;
       }},
      {"network twice as fast", [](Cluster& c) { c.network_bytes_per_second *= 2.0; }},
      {"transfers cost nothing beside operators",
       [](Cluster& c) {
         c.overlap_cost = 0.0;
         c.direct_overlap_cost = 0.0;
       }},
      {"SMs move twice as many rows",
       [](Cluster& c) {
         c.sm_written_per_second *= 2.0;
         c.sm_read_per_second *= 2.0;
         c.sm_summed_per_second *= 2.0;
       }},
      {"all GPUs equally fast", [](Cluster& c) { c.straggler = 0.0; }},
      {"no time between operators", [](Cluster& c) { c.calibration.seconds_per_operator = 0.0; }}};
  const double before = forecast_run(run, cluster, routing).tokens_per_second_per_gpu();
  std::vector<Sensitivity> result;
  for (const auto& [name, change] : changes) {
    Cluster changed = cluster;
    change(changed);
    result.push_back({name, forecast_run(run, changed, routing).tokens_per_second_per_gpu() / before - 1.0});
  }
  std::ranges::stable_sort(result, std::greater(), &Sensitivity::gain);
  return result;
}

std::vector<FoundLayout> frontier(const std::vector<FoundLayout>& fastest_first) {
  std::vector<FoundLayout> result;
  for (const FoundLayout& layout : fastest_first) {
    if (result.empty() || layout.memory_bytes < result.back().memory_bytes) result.push_back(layout);
  }
  return result;
}

}  // namespace tessera
