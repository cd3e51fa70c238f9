// Compares a search with all layouts of a small space.
#include "plan/layout_search.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <span>

#include "base/median.h"
#include "config/job_config.h"
#include "run/record/metrics.h"
#include "tests/expect_error.h"
#include "tests/step/small_model.h"

namespace tessera {
namespace {

JobConfig config_to_search(const std::vector<std::string>& overrides = {}) {
  static const std::string kToml = std::string(kSmallModel) + R"(
[training]
global_batch_size = 48
seq_len = 32
[quantize.linear.mx]
unaligned = "bf16"
[quantize.grouped_mm.mx]
unaligned = "bf16"
)";
  return parse_job_config(kToml, overrides);
}

Cluster cluster_of(double memory_bytes) {
  Cluster cluster;
  cluster.name = "a test";
  cluster.gpus_per_domain = 2;
  cluster.memory_bytes = memory_bytes;
  cluster.domain_bytes_per_second = cluster.direct_bytes_per_second = 1e9;
  cluster.network_bytes_per_second = 1e8;
  cluster.sm_written_per_second = cluster.sm_read_per_second = cluster.sm_summed_per_second = 1e8;
  cluster.num_sms = 100;
  cluster.rules = {{.operators = {"*"}, .type = {}, .bytes_per_second = 1e9}};
  return cluster;
}

using SpeedAndMemory = std::pair<double, double>;  // the speed negated, so that the fastest come first

const std::vector<double> kFactors = {1.5, 1.1};

std::optional<SpeedAndMemory> plan_alone(const JobConfig& job, const Cluster& cluster, int num_ranks) {
  const MeshDegrees degrees = resolve(job.mesh_degrees(), num_ranks);
  job.validate_on(degrees);
  const RunForecast forecast = forecast_run({job, Device::kCpu, degrees}, cluster, RoutingKind::kUniform);
  const auto memory = static_cast<double>(forecast.memory.total());
  if (memory > cluster.memory_bytes) return std::nullopt;
  return SpeedAndMemory{-forecast.tokens_per_second_per_gpu(), memory};
}

/// The degrees of pipeline, tensor and expert parallelism that so many ranks may have.
const std::map<int, std::vector<const char*>> kDegrees = {
    {4, {"1 1 1", "1 1 2", "1 1 4", "1 2 1", "1 2 2", "1 2 4", "2 1 1", "2 1 2", "2 2 1", "2 2 2", "4 1 1"}},
    {6, {"1 1 1", "1 1 2", "1 2 1", "1 2 2", "2 1 1", "3 1 1", "3 1 2", "3 2 1", "3 2 2"}}};

/// Returns the speed and the memory of every layout, without a search. Weights are quantized for each pass where a
/// layout does not fit otherwise.
std::vector<SpeedAndMemory> all_layouts(const Cluster& cluster, const std::string& precision, int num_ranks) {
  std::vector<SpeedAndMemory> found;
  for (const char* degrees : kDegrees.at(num_ranks)) {
    const std::string pp(degrees, 1), tp(degrees + 2, 1), ep(degrees + 4, 1);
    for (const char* batch : {"1", "2", "4"}) {
      for (const char* schedule : {"1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"}) {
        if (pp == "1" && schedule != std::string("1F1B")) continue;
        for (const char* mode : {"none", "selective", "full"}) {
          JobConfig job = in_precision(
              config_to_search(
                  {"--parallelism.pipeline_parallel_degree=" + pp, "--parallelism.tensor_parallel_degree=" + tp,
                   "--parallelism.expert_parallel_degree=" + ep, "--parallelism.expert_parallel_capacity_factor=1.1",
                   std::string("--training.local_batch_size=") + batch,
                   std::string("--parallelism.pipeline_parallel_microbatch_size=") + batch,
                   std::string("--parallelism.pipeline_parallel_schedule=") + schedule,
                   std::string("--activation_checkpoint.mode=") + mode}),
              precision);
          try {
            job.validate();
            std::optional<SpeedAndMemory> layout = plan_alone(job, cluster, num_ranks);
            if (!layout && precision != "bf16") {
              job.quantize.keep_weights = false;
              layout = plan_alone(job, cluster, num_ranks);
            }
            if (layout) found.push_back(*layout);
          } catch (const Error&) {
            continue;  // no such layout
          }
        }
      }
    }
  }
  std::ranges::sort(found);
  return found;
}

std::vector<SpeedAndMemory> in_numbers(const std::vector<FoundLayout>& layouts) {
  std::vector<SpeedAndMemory> numbers;
  for (const FoundLayout& layout : layouts) {
    numbers.emplace_back(-layout.tokens_per_second_per_gpu, layout.memory_bytes);
  }
  return numbers;
}

std::vector<FoundLayout> of_precision(const std::vector<FoundLayout>& layouts, const std::string& precision) {
  std::vector<FoundLayout> result;
  std::ranges::copy_if(layouts, std::back_inserter(result),
                       [&](const FoundLayout& layout) { return precision_of(layout.config) == precision; });
  return result;
}

TEST(LayoutSearch, FindsWhatTryingAllFinds) {
  const JobConfig job = config_to_search();
  std::vector<double> sizes;
  for (const auto& [speed, bytes] : all_layouts(cluster_of(1e12), "bf16", 4)) sizes.push_back(bytes);
  // Half of the layouts of 4 ranks fit the second one. What they take depends on the machine's threads.
  for (const auto& [num_ranks, memory] : {std::pair{4, 1e12}, {4, median(sizes)}, {6, 1e12}}) {
    SCOPED_TRACE(fmt::format("{} ranks, {}", num_ranks, memory));
    const Cluster cluster = cluster_of(memory);
    const FoundLayouts found = search_layouts({.job = job,
                                               .num_ranks = num_ranks,
                                               .cluster = cluster,
                                               .precisions = {"bf16", "mxfp8"},
                                               .capacity_factors = kFactors,
                                               .num_shown = 3,
                                               .device = Device::kCpu,
                                               .num_threads = 2});
    const bool all_fit = memory > 1e9;
    EXPECT_EQ(found.num_too_large == 0, all_fit);
    std::size_t num_possible = 0;
    std::vector<FoundLayout> expected;  // of all precisions
    for (const char* precision : {"bf16", "mxfp8"}) {
      SCOPED_TRACE(precision);
      const std::vector<SpeedAndMemory> all = all_layouts(cluster, precision, num_ranks);
      const std::vector<SpeedAndMemory> speeds = in_numbers(of_precision(found.fitting, precision));
      ASSERT_GT(all.size(), 3u);
      ASSERT_GT(speeds.size(), 3u);
      EXPECT_EQ(speeds.front(), all.front());
      // If all layouts fit, the search tries all layouts of the fastest precision, but not of the others. If some do
      // not fit, it skips modes and schedules that take more memory than one that does not fit.
      EXPECT_TRUE(std::ranges::includes(all, speeds));
      const bool is_fastest = precision_of(found.fitting.front().config) == precision;
      if (all_fit) {
        EXPECT_EQ(speeds.size() == all.size(), is_fastest);
      }
      num_possible += all_layouts(cluster_of(1e12), precision, num_ranks).size();
      for (const auto& [speed, bytes] : all) {
        expected.push_back({.config = {}, .tokens_per_second_per_gpu = -speed, .memory_bytes = bytes});
      }
    }
    EXPECT_LE(found.num_too_large, num_possible - expected.size());  // each is counted once
    std::ranges::sort(expected, {}, [](const FoundLayout& layout) {
      return std::pair(-layout.tokens_per_second_per_gpu, layout.memory_bytes);
    });
    EXPECT_EQ(in_numbers(frontier(found.fitting)), in_numbers(frontier(expected)));
  }
}

TEST(LayoutSearch, ShownLayoutsHaveTheMostRoomThatFits) {
  const JobConfig job = config_to_search();
  const auto search = [&](double memory) {
    const Cluster cluster = cluster_of(memory);
    return search_layouts({.job = job,
                           .num_ranks = 4,
                           .cluster = cluster,
                           .capacity_factors = kFactors,
                           .num_shown = 1000,
                           .device = Device::kCpu});
  };
  const FoundLayouts roomy = search(1e12);
  double largest = 0.0;
  for (const FoundLayout& layout : roomy.fitting) {
    EXPECT_EQ(layout.config.parallelism.expert_parallel_capacity_factor, 1.5);
    EXPECT_GE(layout.most_room_bytes, layout.memory_bytes);
    const std::vector<std::string> row = layout_row(layout, 4);
    ASSERT_EQ(row.size(), std::size(kLayoutTitles));
    EXPECT_EQ(row[9], format_gib(static_cast<std::size_t>(layout.memory_bytes)));
    EXPECT_EQ(row[10], "1.5: " + format_gib(static_cast<std::size_t>(layout.most_room_bytes)));
    if (layout.config.parallelism.expert_parallel_degree > 1) largest = std::max(largest, layout.most_room_bytes);
  }
  std::set<double> factors;
  const FoundLayouts tight = search(largest - 1.0);
  for (const FoundLayout& layout : tight.fitting) {
    factors.insert(layout.config.parallelism.expert_parallel_capacity_factor);
    EXPECT_LT(layout.most_room_bytes, largest);
    EXPECT_EQ(plan_alone(layout.config, cluster_of(1e12), 4)->second, layout.most_room_bytes);
  }
  EXPECT_EQ(factors, std::set<double>(kFactors.begin(), kFactors.end()));
}

TEST(LayoutSearch, RecordedLoadsHaveRoom) {
  const JobConfig job = config_to_search();
  ExpertLoads loads{.step = 1, .tokens = {}, .path = "loads.json"};
  for (const char* layer : {"layers.1.moe", "layers.2.moe", "layers.3.moe"}) {
    loads.tokens[layer] = {1.3, 1.1, 1.3, 1.1, 0.8, 0.8, 0.8, 0.8};  // 1.2 times the mean on 2 and 4 ranks
  }
  const Cluster cluster = cluster_of(1e12);
  LayoutSearch search{.job = job,
                      .num_ranks = 4,
                      .cluster = cluster,
                      .routing = {RoutingKind::kUniform, &loads},
                      .capacity_factors = kFactors,
                      .device = Device::kCpu};
  std::set<double> factors;
  for (const FoundLayout& layout : search_layouts(search).fitting) {
    if (layout.most_room_bytes > 0.0) continue;  // has the largest factor, as all of the frontier
    const double factor = layout.config.parallelism.expert_parallel_capacity_factor;
    EXPECT_EQ(factor, layout.config.parallelism.expert_parallel_degree > 1 ? 1.5 : 1.1);
    factors.insert(factor);
  }
  EXPECT_EQ(factors.size(), 2u);
  search.capacity_factors = {1.1};
  for (const FoundLayout& layout : search_layouts(search).fitting) {
    EXPECT_EQ(layout.config.parallelism.expert_parallel_degree, 1);
  }
}

TEST(LayoutSearch, TheFrontierHasWhatNothingBeats) {
  const auto layout = [](double speed, double memory) {
    return FoundLayout{.config = {}, .tokens_per_second_per_gpu = speed, .memory_bytes = memory};
  };
  const std::vector<FoundLayout> best =
      frontier({layout(9, 5), layout(8, 5), layout(7, 3), layout(6, 4), layout(5, 1)});
  ASSERT_EQ(best.size(), 3u);
  EXPECT_EQ(best[0].tokens_per_second_per_gpu, 9);
  EXPECT_EQ(best[1].tokens_per_second_per_gpu, 7);
  EXPECT_EQ(best[2].tokens_per_second_per_gpu, 5);
}

/// Returns a cluster where only bytes of operators take time.
Cluster cluster_of_operators() {
  Cluster cluster = cluster_of(1e30);
  cluster.gpus_per_domain = 4;
  cluster.domain_bytes_per_second = cluster.network_bytes_per_second = cluster.direct_bytes_per_second = 1e30;
  cluster.sm_written_per_second = cluster.sm_read_per_second = cluster.sm_summed_per_second = 1e30;
  return cluster;
}

std::vector<Sensitivity> sensitivities_of_four_ranks(const Cluster& cluster, const MeshDegrees& degrees = {}) {
  const JobConfig job =
      config_to_search({"--training.local_batch_size=1", "--parallelism.expert_parallel_comm_backend=direct"});
  return sensitivities({job, Device::kCpu, resolve(degrees, 4)}, cluster, RoutingKind::kUniform);
}

// Where only bytes of operators take time, only faster operators are a gain. One rule is for all of them.
TEST(LayoutSearch, SensitivitiesAreOfWhatTakesTime) {
  const std::vector<Sensitivity> found = sensitivities_of_four_ranks(cluster_of_operators());
  ASSERT_GT(found.size(), 4u);
  EXPECT_EQ(found[0].change, "products and attention 10 % faster");
  EXPECT_EQ(found[1].change, "other operators 10 % faster");
  EXPECT_GT(found[1].gain, 0.001);
  // Each part of the step's time becomes 1.1 times as short.
  const double saved = (1.0 - 1.0 / (1.0 + found[0].gain)) + (1.0 - 1.0 / (1.0 + found[1].gain));
  EXPECT_NEAR(saved, 1.0 - 1.0 / 1.1, 1e-6);
  for (const Sensitivity& one : std::span(found).subspan(2)) EXPECT_NEAR(one.gain, 0.0, 1e-9) << one.change;
}

/// Lets calls of a dispatcher run beside another micro-batch, whose operators take longer.
void let_calls_overlap(Cluster& cluster) {
  cluster.direct_bytes_per_second = 1e8;
  cluster.engine.overlaps_micro_batches = true;
}

TEST(LayoutSearch, TheChangeThatTakesAwayACostGainsMost) {
  constexpr const char *kNvlink = "NVLink twice as fast", *kSms = "SMs move twice as many rows",
                       *kOverlap = "transfers cost nothing beside operators", *kHost = "no time between operators";
  using Case = std::pair<const char*, void (*)(Cluster&)>;
  const Case cases[] = {
      {kNvlink, [](Cluster& c) { c.domain_bytes_per_second = 1e6; }},
      {kNvlink, [](Cluster& c) { c.direct_bytes_per_second = 1e6; }},
      {"network twice as fast", [](Cluster& c) { c.network_bytes_per_second = 1e6, c.gpus_per_domain = 2; }},
      {kOverlap, [](Cluster& c) { c.domain_bytes_per_second = 1e9, c.overlap_cost = 1.0; }},
      {kOverlap, [](Cluster& c) { let_calls_overlap(c), c.direct_overlap_cost = 1.0; }},
      {kOverlap, [](Cluster& c) { let_calls_overlap(c), c.engine.dispatch_overlap_cost = 0.9; }},
      {kSms, [](Cluster& c) { c.sm_written_per_second = 1e6; }},
      {kSms, [](Cluster& c) { c.sm_read_per_second = 1e6; }},
      {kSms, [](Cluster& c) { c.sm_summed_per_second = 1e6; }},
      {"all GPUs equally fast", [](Cluster& c) { c.straggler = 1.0; }},
      {kHost, [](Cluster& c) { c.calibration.seconds_per_operator = 1e-2; }},
      {kHost, [](Cluster& c) { c.engine.host_seconds = 1e-2; }}};
  int number = 0;
  for (const auto& [change, add_cost] : cases) {
    SCOPED_TRACE(fmt::format("case {}", number++));
    Cluster cluster = cluster_of_operators();
    add_cost(cluster);
    const std::vector<Sensitivity> found = sensitivities_of_four_ranks(cluster, {.ep = 4});
    ASSERT_FALSE(found.empty());
    EXPECT_EQ(found.front().change, change);
    EXPECT_GT(found.front().gain, 0.0);
  }
}

TEST(LayoutSearch, AnEngineThatHidesNoCallGainsNothingFromFreeTransfers) {
  Cluster cluster = cluster_of_operators();
  let_calls_overlap(cluster);
  cluster.engine.dispatch_overlap_cost = 1.0;
  const std::vector<Sensitivity> found = sensitivities_of_four_ranks(cluster, {.ep = 4});
  const auto change = std::ranges::find(found, "transfers cost nothing beside operators", &Sensitivity::change);
  ASSERT_NE(change, found.end());
  EXPECT_EQ(change->gain, 0.0);
}

// If only transfers within a domain take time, faster NVLink gains most. This also holds if each kind of transfer has a
// rate of its own.
TEST(LayoutSearch, NvlinkIsAlsoTheRatesOfKinds) {
  Cluster cluster = cluster_of_operators();
  for (const char* kind : kTransferKinds) cluster.domain_bytes_per_second_of[kind] = 1e6;
  const std::vector<Sensitivity> found = sensitivities_of_four_ranks(cluster);
  ASSERT_FALSE(found.empty());
  EXPECT_EQ(found.front().change, "NVLink twice as fast");
  // The step then takes half as long, but for the operators. An operator hides at most as many seconds of a stream's
  // transfers as it takes itself, so the gain is not above 1.
  EXPECT_GE(found.front().gain, 0.99);
  EXPECT_LE(found.front().gain, 1.0);
}

// Layouts that a run could not cut at domains are left out, and the others are found.
TEST(LayoutSearch, WhatCannotBeCutAtDomainsIsLeftOut) {
  Cluster cluster = cluster_of(1e12);
  cluster.gpus_per_domain = 1;
  const JobConfig job = config_to_search({"--parallelism.expert_parallel_comm_backend=direct"});
  const FoundLayouts found = search_layouts({.job = job, .num_ranks = 4, .cluster = cluster, .device = Device::kCpu});
  EXPECT_FALSE(found.fitting.empty());
  for (const FoundLayout& layout : found.fitting) EXPECT_EQ(layout.config.parallelism.expert_parallel_degree, 1);
}

TEST(LayoutSearch, ARunThatNoLayoutMakesPossibleIsRefused) {
  const JobConfig job = config_to_search({"--parallelism.context_parallel_degree=3"});
  const Cluster cluster = cluster_of(1e12);
  expect_error([&] { search_layouts({.job = job, .num_ranks = 4, .cluster = cluster, .device = Device::kCpu}); },
               {"no layout is possible", "context_parallel_degree"});
}

}  // namespace
}  // namespace tessera
