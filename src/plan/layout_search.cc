#include "plan/layout_search.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>
#include <future>
#include <mutex>
#include <numeric>
#include <optional>
#include <set>
#include <tuple>

#include "run/record/metrics.h"

namespace tessera {
namespace {

struct Degrees {
  std::int64_t pp, tp, ep;
};

/// This many degrees, the fastest in the first round, are tried with all schedules, modes and micro-batches.
constexpr std::size_t kKept = 12;
/// This many degrees with a micro-batch, the fastest in the second round, are tried in all precisions.
constexpr std::size_t kKeptForPrecisions = 6;

constexpr std::int64_t kMicroBatches[] = {1, 2, 4};  // sequences
// Modes are in the order of the memory that they take. The first schedule takes least.
constexpr Recompute kModes[] = {Recompute::kFull, Recompute::kSelective, Recompute::kNone};
constexpr PipelineScheduleKind kSchedules[] = {PipelineScheduleKind::k1F1B, PipelineScheduleKind::kInterleaved1F1B,
                                               PipelineScheduleKind::kZBV, PipelineScheduleKind::kDualPipeV};

std::vector<Degrees> degrees_of(const LayoutSearch& search) {
  const ModelConfig& model = search.job.model.args;
  const std::int64_t ranks = search.num_ranks, experts = model.num_moe_layers() > 0 ? model.num_experts : 1;
  std::vector<Degrees> all;
  for (std::int64_t pp = 1; pp <= std::min(ranks, model.n_layers); ++pp) {
    if (ranks % pp != 0) continue;
    for (std::int64_t tp = 1; tp <= std::min<std::int64_t>(search.cluster.gpus_per_domain, model.n_heads); ++tp) {
      // A group that fills no whole part of a domain would cross to the next one.
      if (ranks / pp % tp != 0 || search.cluster.gpus_per_domain % tp != 0) continue;
      for (std::int64_t ep = 1; ep <= experts; ++ep) {
        if (ranks / pp % ep != 0 || experts % ep != 0) continue;
        all.push_back({pp, tp, ep});
      }
    }
  }
  return all;
}

/// Returns the job with these degrees. `job` is LayoutSearch::job in some precision.
JobConfig config_of(const JobConfig& job, const Degrees& degrees, std::int64_t micro_batch) {
  JobConfig config = job;
  auto& parallelism = config.parallelism;
  parallelism.pipeline_parallel_degree = degrees.pp;
  parallelism.tensor_parallel_degree = degrees.tp;
  parallelism.expert_parallel_degree = degrees.ep;
  parallelism.expert_parallel_ranks_per_domain = 0;
  config.training.local_batch_size = parallelism.pipeline_parallel_microbatch_size = micro_batch;
  return config;
}

/// Returns the sequences of a step, which all layouts share. Throws Error if neither global_batch_size nor the job's
/// own degrees say how many they are.
std::int64_t sequences_of(const LayoutSearch& search) {
  if (search.job.training.global_batch_size > 0) return search.job.training.global_batch_size;
  const MeshDegrees degrees = [&] {
    try {
      return resolve(search.job.mesh_degrees(), search.num_ranks);
    } catch (const Error& error) {
      fail(
          "training.global_batch_size is not set, and the configuration's own layout, which says how many sequences a "
          "step has, cannot be: {}",
          error.what());
    }
  }();
  return search.job.sequences_per_step(degrees.dp_replicate * degrees.dp_shard);
}

/// Plans layouts, from several threads.
class Searcher {
 public:
  explicit Searcher(const LayoutSearch& search)
      : search_(search), capacity_factors_(search.capacity_factors), sequences_(sequences_of(search)) {
    if (capacity_factors_.empty()) {
      capacity_factors_ = {search.job.parallelism.expert_parallel_capacity_factor};
    }
    std::ranges::sort(capacity_factors_, gives_less_room);
    for (const std::string& name : search.precisions) jobs_.push_back(in_precision(search.job, name));
    if (jobs_.empty()) jobs_.push_back(search.job);
    for (JobConfig& job : jobs_) job.training.global_batch_size = sequences_;
  }

  std::size_t num_precisions() const { return jobs_.size(); }

  /// Tries the degrees in the way that takes least memory. Returns the tokens per second and GPU, or 0 if that is not
  /// possible or does not fit.
  double try_plainly(const Degrees& degrees, std::size_t precision) {
    JobConfig config = config_of(jobs_[precision], degrees, 1);
    config.parallelism.pipeline_parallel_schedule = name_of(PipelineScheduleKind::k1F1B);
    config.activation_checkpoint.mode = Recompute::kFull;
    const std::optional<FoundLayout> layout = plan_to_fit(config);
    return layout ? layout->tokens_per_second_per_gpu : 0.0;
  }

  /// Adds all layouts with these degrees and micro-batches that fit. Returns the largest tokens per second and GPU, or
  /// 0 if none fits.
  double try_all(const Degrees& degrees, std::int64_t micro_batch, std::size_t precision) {
    double fastest = 0.0;
    for (const PipelineScheduleKind kind : kSchedules) {
      JobConfig config = config_of(jobs_[precision], degrees, micro_batch);
      config.parallelism.pipeline_parallel_schedule = name_of(kind);
      bool fits_any = false;
      for (const Recompute mode : kModes) {
        config.activation_checkpoint.mode = mode;
        std::optional<FoundLayout> layout = plan_to_fit(config);
        if (!layout) break;
        fits_any = true;
        fastest = std::max(fastest, layout->tokens_per_second_per_gpu);
        const std::scoped_lock lock(mutex_);
        found_.fitting.push_back(std::move(*layout));
      }
      if (degrees.pp == 1 || (kind == PipelineScheduleKind::k1F1B && !fits_any)) break;
    }
    return fastest;
  }

  /// Gives the layout the largest capacity factor with which it fits.
  void give_room(FoundLayout& layout) {
    for (auto factor = capacity_factors_.rbegin(); factor != capacity_factors_.rend(); ++factor) {
      layout.config.parallelism.expert_parallel_capacity_factor = *factor;
      const std::optional<FoundLayout> planned = plan(layout.config);
      if (!planned || planned->memory_bytes > search_.cluster.memory_bytes) continue;
      layout.most_room_bytes = planned->memory_bytes;
      return;
    }
    TESSERA_CHECK(false, "{}", layout.memory_bytes);
  }

  FoundLayouts result() {
    require(!found_.fitting.empty() || !too_large_.empty(), "no layout is possible: {}", first_error_);
    found_.num_too_large = too_large_.size();
    std::ranges::sort(found_.fitting, [](const FoundLayout& a, const FoundLayout& b) {
      return std::pair(-a.tokens_per_second_per_gpu, a.memory_bytes) <
             std::pair(-b.tokens_per_second_per_gpu, b.memory_bytes);
    });
    return std::move(found_);
  }

 private:
  /// Sets the least capacity factor that has room for the recorded loads. Returns false if none has.
  bool set_least_factor(JobConfig& config) {
    auto least = capacity_factors_.begin();
    if (search_.routing.loads != nullptr && config.parallelism.expert_parallel_degree > 1) {
      const BusiestRank busiest = busiest_rank(*search_.routing.loads, config);
      least = std::ranges::find_if(capacity_factors_, [&](double f) { return !gives_less_room(f, busiest.most); });
    }
    if (least == capacity_factors_.end()) return false;
    config.parallelism.expert_parallel_capacity_factor = *least;
    return true;
  }

  /// Returns nothing if the layout is not possible, or does not fit.
  std::optional<FoundLayout> plan_to_fit(JobConfig& config) {
    if (!set_least_factor(config)) {
      const std::scoped_lock lock(mutex_);
      if (first_error_.empty()) {
        first_error_ =
            fmt::format("the load of '{}' has no room with any capacity factor", search_.routing.loads->path.string());
      }
      return std::nullopt;
    }
    std::optional<FoundLayout> layout = plan(config);
    if (layout && layout->memory_bytes <= search_.cluster.memory_bytes) return layout;
    if (layout && config.quantize.keep_weights && !config.model.converters.empty()) {
      config.quantize.keep_weights = false;
      layout = plan(config);
      if (layout && layout->memory_bytes <= search_.cluster.memory_bytes) return layout;
    }
    if (!layout) return std::nullopt;
    const auto& p = config.parallelism;
    const std::scoped_lock lock(mutex_);
    too_large_.emplace(p.pipeline_parallel_degree, p.tensor_parallel_degree, p.expert_parallel_degree,
                       config.micro_batch_size(), p.pipeline_parallel_schedule, config.activation_checkpoint.mode,
                       precision_of(config));
    return std::nullopt;
  }

  /// Returns nothing if the layout is not possible.
  std::optional<FoundLayout> plan(JobConfig config) {
    try {
      set_ranks_per_domain(config, search_.num_ranks, search_.cluster);
      config.validate();
      const MeshDegrees degrees = resolve(config.mesh_degrees(), search_.num_ranks);
      config.validate_on(degrees);
      const RunForecast forecast = forecast_run({config, search_.device, degrees}, search_.cluster, search_.routing);
      const double bubble = forecast.step.ranks[forecast.step.slowest].bubble_seconds;
      return FoundLayout{.config = config,
                         .tokens_per_second_per_gpu = forecast.tokens_per_second_per_gpu(),
                         .memory_bytes = static_cast<double>(forecast.memory.total()) + search_.cluster.reserved_bytes,
                         .bubble = bubble / forecast.seconds};
    } catch (const MissingRate&) {
      throw;
    } catch (const Error& error) {
      const std::scoped_lock lock(mutex_);
      if (first_error_.empty()) first_error_ = error.what();
    }
    return std::nullopt;
  }

  const LayoutSearch& search_;
  std::vector<double> capacity_factors_;  // the least first
  std::int64_t sequences_;
  std::vector<JobConfig> jobs_;  // by precision
  std::mutex mutex_;
  FoundLayouts found_;
  // Layouts that do not fit: degrees, micro-batch, schedule, mode and precision. Rounds of the search meet them again.
  std::set<std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::string, Recompute, std::string>>
      too_large_;
  std::string first_error_;
};

/// Returns the indices of the largest numbers, largest first, without those of zeros.
std::vector<std::size_t> largest(const std::vector<double>& numbers, std::size_t most) {
  std::vector<std::size_t> order(numbers.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::erase_if(order, [&](std::size_t i) { return numbers[i] == 0.0; });
  std::ranges::stable_sort(order, std::greater(), [&](std::size_t i) { return numbers[i]; });
  order.resize(std::min(order.size(), most));
  return order;
}

/// Returns which of the layouts, the fastest first, no other one beats in both speed and memory.
std::vector<std::size_t> indices_of_frontier(const std::vector<FoundLayout>& fastest_first) {
  std::vector<std::size_t> result;
  for (std::size_t i = 0; i < fastest_first.size(); ++i) {
    if (result.empty() || fastest_first[i].memory_bytes < fastest_first[result.back()].memory_bytes) {
      result.push_back(i);
    }
  }
  return result;
}

}  // namespace

FoundLayouts search_layouts(const LayoutSearch& search) {
  const std::vector<Degrees> all = degrees_of(search);
  Searcher searcher(search);
  /// Calls work(i) for each i below `count`, from all threads. Returns the results.
  const auto for_each = [&](std::size_t count, const auto& work) {
    std::vector<double> results(count);
    std::atomic<std::size_t> next = 0;
    const auto run = [&] {
      for (std::size_t i = next++; i < count; i = next++) results[i] = work(i);
    };
    std::vector<std::future<void>> others;
    for (int i = 1; i < search.num_threads; ++i) others.push_back(std::async(std::launch::async, run));
    run();
    for (std::future<void>& other : others) other.get();
    return results;
  };
  const std::size_t num_precisions = searcher.num_precisions();
  std::vector<double> plainly;
  std::vector<std::size_t> kept;
  std::size_t first = 0;  // precision in which degrees are compared: the first in which some are possible and fit
  for (; first < num_precisions && kept.empty(); ++first) {
    plainly = for_each(all.size(), [&](std::size_t i) { return searcher.try_plainly(all[i], first); });
    kept = largest(plainly, kKept);
  }
  if (kept.empty()) return searcher.result();
  --first;
  const std::vector<double> by_precision = for_each(num_precisions, [&](std::size_t p) {
    return p == first ? plainly[kept[0]] : searcher.try_plainly(all[kept[0]], p);
  });
  const std::size_t fastest = largest(by_precision, 1).front();
  const auto num_batches = static_cast<std::size_t>(std::size(kMicroBatches));
  const std::vector<double> rates = for_each(kept.size() * num_batches, [&](std::size_t i) {
    return searcher.try_all(all[kept[i / num_batches]], kMicroBatches[i % num_batches], fastest);
  });
  const std::vector<std::size_t> repeated = largest(rates, kKeptForPrecisions);
  for_each(repeated.size() * num_precisions, [&](std::size_t i) {
    const std::size_t idx = repeated[i / num_precisions], precision = i % num_precisions;
    if (precision == fastest) return 0.0;
    return searcher.try_all(all[kept[idx / num_batches]], kMicroBatches[idx % num_batches], precision);
  });
  FoundLayouts found = searcher.result();
  std::vector<std::size_t> shown = indices_of_frontier(found.fitting);
  for (std::size_t i = 0; i < std::min(found.fitting.size(), static_cast<std::size_t>(search.num_shown)); ++i) {
    if (std::ranges::count(shown, i) == 0) shown.push_back(i);
  }
  for_each(shown.size(), [&](std::size_t i) {
    searcher.give_room(found.fitting[shown[i]]);
    return 0.0;
  });
  return found;
}

std::string capacity_text(double factor) { return factor == 0.0 ? "any load" : fmt::format("{:g}", factor); }

std::vector<std::string> layout_row(const FoundLayout& layout, std::int64_t num_ranks) {
  const JobConfig& config = layout.config;
  const auto& p = config.parallelism;
  const auto modes = recompute_modes();
  const auto mode = std::ranges::find(modes, config.activation_checkpoint.mode, &decltype(modes)::value_type::second);
  const bool quantizes_per_pass = !config.model.converters.empty() && !config.quantize.keep_weights;
  const auto gib = [](double bytes) { return format_gib(static_cast<std::size_t>(bytes)); };
  return {
      std::to_string(p.pipeline_parallel_degree),
      std::to_string(p.tensor_parallel_degree),
      std::to_string(p.expert_parallel_degree),
      std::to_string(num_ranks / (p.pipeline_parallel_degree * p.tensor_parallel_degree * p.context_parallel_degree)),
      std::to_string(config.micro_batch_size()),
      p.pipeline_parallel_degree > 1 ? p.pipeline_parallel_schedule : "-",
      mode->first,
      precision_of(config) + (quantizes_per_pass ? " *" : ""),
      fmt::format("{:.1f} %", 100.0 * layout.bubble),
      gib(layout.memory_bytes),
      layout.most_room_bytes == 0.0
          ? "-"
          : fmt::format("{}: {}", capacity_text(p.expert_parallel_capacity_factor), gib(layout.most_room_bytes)),
      fmt::format("{:.0f}", layout.tokens_per_second_per_gpu)};
}

bool gives_less_room(double a, double b) { return (a == 0.0 ? HUGE_VAL : a) < (b == 0.0 ? HUGE_VAL : b); }

std::vector<Sensitivity> sensitivities(const PlannedRun& run, const Cluster& cluster, const Routing& routing) {
  constexpr double kFaster = 1.1;
  using Change = std::pair<const char*, void (*)(Cluster&)>;
  const Change changes[] = {
      {"products and attention 10 % faster", [](Cluster& c) { c.products_speedup = kFaster; }},
      {"other operators 10 % faster", [](Cluster& c) { c.others_speedup = kFaster; }},
      {"NVLink twice as fast",
       [](Cluster& c) {
         c.domain_bytes_per_second *= 2.0;
         for (auto& [kind, rate] : c.domain_bytes_per_second_of) rate *= 2.0;
         c.direct_bytes_per_second *= 2.0;
       }},
      {"network twice as fast", [](Cluster& c) { c.network_bytes_per_second *= 2.0; }},
      {"transfers cost nothing beside operators",
       [](Cluster& c) {
         c.overlap_cost = 0.0;
         c.direct_overlap_cost = 0.0;
         // An engine with the cost 1 has nothing beside its dispatches.
         if (c.engine.dispatch_overlap_cost > 0.0 && c.engine.dispatch_overlap_cost < 1.0) {
           c.engine.dispatch_overlap_cost = 0.0;
         }
       }},
      {"SMs move twice as many rows",
       [](Cluster& c) {
         c.sm_written_per_second *= 2.0;
         c.sm_read_per_second *= 2.0;
         c.sm_summed_per_second *= 2.0;
       }},
      {"all GPUs equally fast", [](Cluster& c) { c.straggler = 0.0; }},
      {"no time between operators",
       [](Cluster& c) {
         c.calibration.seconds_per_operator = 0.0;
         c.engine.host_seconds = 0.0;
       }},
  };
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
  for (const std::size_t i : indices_of_frontier(fastest_first)) result.push_back(fastest_first[i]);
  return result;
}

}  // namespace tessera
