// Predicts runs of several ranks, and checks what must hold whatever the rates are.
#include "plan/run_forecast.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <set>

#include "config/job_config.h"
#include "parallel/pipeline_timing.h"
#include "plan/transfer_times.h"
#include "tests/expect_error.h"
#include "tests/step/small_model.h"

namespace tessera {
namespace {

using Overrides = std::vector<std::string>;

JobConfig config_of_ranks(const Overrides& overrides) {
  static const std::string kToml = std::string(kSmallModel) + R"(
[training]
local_batch_size = 4
seq_len = 32
)";
  return parse_job_config(kToml, overrides);
}

/// Returns a cluster where nothing takes time but what a test adds.
Cluster free_cluster() {
  constexpr double kFast = 1e30;
  Cluster cluster;
  cluster.name = "free";
  cluster.gpus_per_domain = 8;
  cluster.domain_bytes_per_second = cluster.network_bytes_per_second = cluster.direct_bytes_per_second = kFast;
  cluster.sm_written_per_second = cluster.sm_read_per_second = cluster.sm_summed_per_second = kFast;
  cluster.peak_flop_per_second = cluster.memory_bytes = kFast;
  cluster.num_sms = 100;
  cluster.rules = {{.operators = {"*"}, .type = {}}};
  return cluster;
}

/// Returns a cluster where everything takes time.
Cluster costly_cluster() {
  Cluster cluster = free_cluster();
  cluster.gpus_per_domain = 2;
  cluster.domain_bytes_per_second = 1e9;
  cluster.network_bytes_per_second = 1e8;
  cluster.direct_bytes_per_second = 1e9;
  cluster.sm_written_per_second = cluster.sm_read_per_second = cluster.sm_summed_per_second = 1e8;
  cluster.seconds_per_host_plan = 1e-5;
  cluster.seconds_per_transfer = cluster.seconds_per_dispatch = 1e-6;
  cluster.overlap_cost = 0.5;
  cluster.straggler = 0.01;
  cluster.rules = {{.operators = {"gemm", "grouped_*", "linear_*", "mla_*"},
                    .type = {},
                    .flop_per_second = 1e10,
                    .bytes_per_second = 1e9,
                    .seconds_per_call = 1e-6},
                   {.operators = {"*"}, .type = {}, .bytes_per_second = 1e9, .seconds_per_call = 1e-6}};
  return cluster;
}

struct Layout {
  const char* name;
  std::int64_t num_ranks;
  MeshDegrees degrees;
  Overrides overrides = {};
};

const std::vector<Layout>& layouts() {
  static const std::vector<Layout> all = {
      {"one", 1, {}},
      {"fsdp4", 4, {}},
      {"replicate2", 4, {.dp_replicate = 2}},
      {"tp2", 4, {.tp = 2}},
      {"cp2", 4, {.cp = 2}},
      {"ep4", 4, {.ep = 4}},
      {"ep4_direct", 4, {.ep = 4}, {"--parallelism.expert_parallel_comm_backend=direct"}},
      {"ep4_of_2x2", 4, {.ep = 4, .ep_domain = 2}, {"--parallelism.expert_parallel_comm_backend=direct"}},
      {"pp2", 2, {.pp = 2}},
      {"pp2_zbv", 4, {.pp = 2, .ep = 2}, {"--parallelism.pipeline_parallel_schedule=ZBVZeroBubble"}},
      {"full", 4, {}, {"--activation_checkpoint.mode=full"}},
  };
  return all;
}

RunForecast forecast(const Layout& layout, const Cluster& cluster) {
  const JobConfig job = config_of_ranks(layout.overrides);
  return forecast_run({job, Device::kCpu, resolve(layout.degrees, layout.num_ranks)}, cluster, RoutingKind::kUniform);
}

TEST(RunForecast, WhatAddsUpIsTheStep) {
  for (const Layout& layout : layouts()) {
    SCOPED_TRACE(layout.name);
    const RunForecast result = forecast(layout, costly_cluster());
    const RankForecast& rank = result.step.ranks[result.step.slowest];
    double sum = 0.0;
    for (const ForecastLine& line : rank.lines) sum += line.seconds;
    EXPECT_NEAR(sum, result.step.passes_seconds - rank.bubble_seconds + rank.once_seconds(), 1e-9 * sum);
    EXPECT_EQ(result.seconds, result.step.seconds * costly_cluster().slowest_of(layout.num_ranks));
    EXPECT_GT(result.memory.total(), 0u);
    const std::int64_t num_batches = result.num_ranks / (layout.degrees.tp * layout.degrees.cp * layout.degrees.pp);
    EXPECT_EQ(result.tokens, static_cast<double>(4 * 32 * num_batches));
  }
}

// Errors of lines have nothing to do with each other, so their squares add up.
TEST(RunForecast, TheSpreadIsThatOfTheRates) {
  const RunForecast result = forecast(layouts().front(), costly_cluster());
  double squares = 0.0;
  for (const ForecastLine& line : result.step.ranks.front().lines) {
    EXPECT_NEAR(line.error_seconds, kUnmeasuredError * line.seconds, 1e-15) << line.name;
    squares += line.error_seconds * line.error_seconds;
  }
  EXPECT_NEAR(result.step.error_seconds(), std::sqrt(squares), 1e-15);
  EXPECT_LT(result.step.error_seconds(), kUnmeasuredError * result.step.seconds);
  EXPECT_GT(result.step.error_seconds(), 0.0);
}

// Ranks of a pipeline that do the same are planned once. Each must still have its own passes, calls and memory.
TEST(RunForecast, OneRankStandsForOthersThatDoTheSame) {
  for (const char* schedule : {"1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"}) {
    SCOPED_TRACE(schedule);
    const JobConfig job = config_of_ranks({"--parallelism.pipeline_parallel_degree=4",
                                           std::string("--parallelism.pipeline_parallel_schedule=") + schedule,
                                           "--model.args.n_layers=13", "--training.local_batch_size=16",
                                           "--parallelism.pipeline_parallel_microbatch_size=1"});
    const PlannedRun run{job, Device::kCpu, resolve({.pp = 4}, 4)};
    const RunForecast found = forecast_run(run, costly_cluster(), RoutingKind::kUniform);
    std::size_t most = 0;
    for (const MemoryPlan& plan : memory_plans(run, job.activation_checkpoint.mode, 1)) {
      most = std::max(most, plan.total());
    }
    EXPECT_EQ(found.memory.total(), most);
    for (std::int64_t pp = 0; pp < 4; ++pp) {
      const TrainingStep step(job, std::make_shared<Mesh>(Mesh::planned(run.degrees, pp)));
      std::map<std::pair<int, std::string>, std::size_t> planned;  // calls, by stage and name
      for (const RecordedOperator& call : step.dry_run().operators()) {
        const bool is_once = !call.pass.starts_with("stage ");
        planned[{is_once ? -1 : std::stoi(call.pass.substr(6)), call.name}] += is_once ? 1 : 16;
      }
      for (const ForecastLine& line : found.step.ranks[static_cast<std::size_t>(pp)].lines) {
        if (!line.is_transfer) planned[{line.stage, line.name}] -= line.num_calls;
      }
      for (const auto& [of, count] : planned) EXPECT_EQ(count, 0u) << pp << ": stage " << of.first << " " << of.second;
    }
  }
}

// Each change also makes a step of at least one layout shorter. What bounds a dispatch differs between the machines:
// the network, SMs, or the links within a domain.
TEST(RunForecast, AFasterMachineNeverMakesAStepLonger) {
  using Change = std::pair<const char*, void (*)(Cluster&)>;
  const Change changes[] = {
      {"domain", [](Cluster& c) { c.domain_bytes_per_second *= 3.0; }},
      {"network", [](Cluster& c) { c.network_bytes_per_second *= 3.0; }},
      {"direct", [](Cluster& c) { c.direct_bytes_per_second *= 3.0; }},
      {"writing", [](Cluster& c) { c.sm_written_per_second *= 3.0; }},
      {"reading", [](Cluster& c) { c.sm_read_per_second *= 3.0; }},
      {"summing", [](Cluster& c) { c.sm_summed_per_second *= 3.0; }},
      {"host", [](Cluster& c) { c.seconds_per_host_plan *= 0.5; }},
      {"transfers", [](Cluster& c) { c.seconds_per_transfer *= 0.5; }},
      {"dispatch", [](Cluster& c) { c.seconds_per_dispatch *= 0.5; }},
      {"overlap", [](Cluster& c) { c.overlap_cost *= 0.5; }},
      {"straggler", [](Cluster& c) { c.straggler *= 0.5; }},
      {"products", [](Cluster& c) { c.rules[0].flop_per_second *= 3.0; }},
      {"outputs", [](Cluster& c) { c.rules[0].bytes_per_second *= 3.0; }},
      {"bytes", [](Cluster& c) { c.rules[1].bytes_per_second *= 3.0; }},
      {"calls", [](Cluster& c) { c.rules[1].seconds_per_call *= 0.5; }},
  };
  std::set<std::string> have_effect;
  Cluster of_slow_sms = costly_cluster();
  for (double Cluster::*rate :
       {&Cluster::sm_written_per_second, &Cluster::sm_read_per_second, &Cluster::sm_summed_per_second}) {
    of_slow_sms.*rate *= 1e-3;
  }
  Cluster of_slow_links = costly_cluster();
  of_slow_links.gpus_per_domain = 4;
  of_slow_links.direct_bytes_per_second *= 1e-3;
  for (const Cluster& cluster : {costly_cluster(), of_slow_sms, of_slow_links}) {
    for (const Layout& layout : layouts()) {
      SCOPED_TRACE(layout.name);
      const double before = forecast(layout, cluster).seconds;
      for (const auto& [name, change] : changes) {
        Cluster faster = cluster;
        change(faster);
        const double after = forecast(layout, faster).seconds;
        EXPECT_LE(after, before * (1.0 + 1e-12)) << name;
        if (after < before * (1.0 - 1e-9)) have_effect.insert(name);
      }
    }
  }
  for (const auto& [name, change] : changes) EXPECT_TRUE(have_effect.contains(name)) << name;
}

// Every call takes 1 s, a message 3 s, and nothing else takes time. So a stage's time is its number of calls, and the
// forecast must equal a simulation of the schedule with these times.
TEST(RunForecast, APipelineFollowsItsSchedule) {
  Cluster cluster = free_cluster();
  cluster.num_sms = 0;
  cluster.seconds_per_transfer = 3.0;
  cluster.rules[0].seconds_per_call = 1.0;
  for (const char* schedule : {"1F1B", "ZBVZeroBubble"}) {
    SCOPED_TRACE(schedule);
    const Layout layout{"pp2", 2, {.pp = 2}, {std::string("--parallelism.pipeline_parallel_schedule=") + schedule}};
    const StepForecast step = forecast(layout, cluster).step;
    const PipelineSchedule passes = config_of_ranks(layout.overrides).pipeline_schedule(resolve({.pp = 2}, 2));
    const std::vector<double> none(static_cast<std::size_t>(passes.num_stages()));
    PipelineCosts costs{.forward = none, .backward_input = none, .backward_weight = none, .communication = 3.0};
    double bubbles = 0.0, once = 0.0;
    for (const RankForecast& rank : step.ranks) {
      ASSERT_EQ(std::ssize(rank.stages), passes.stages_per_rank);
      for (const StageTimes& stage : rank.stages) {
        const auto s = static_cast<std::size_t>(stage.stage);
        const bool is_split = passes.kind == PipelineScheduleKind::kZBV;
        EXPECT_EQ(stage.forward, std::round(stage.forward));
        costs.forward.at(s) = stage.forward;
        costs.backward_input.at(s) = is_split ? stage.backward : 0.5 * stage.backward;
        costs.backward_weight.at(s) = is_split ? stage.weight_gradients : 0.5 * stage.backward;
      }
      bubbles += rank.bubble_seconds;
      once = std::max(once, rank.once_seconds());
    }
    EXPECT_DOUBLE_EQ(step.passes_seconds, simulate(passes, costs).makespan);
    EXPECT_GT(bubbles, 0.0);
    EXPECT_EQ(step.seconds, step.passes_seconds + once);
  }
}

// A link keeps an SM of 100. A rank has one to and one from each neighbour, whose stages come before or after its own.
TEST(RunForecast, ProductsLeaveSmsToLinks) {
  Cluster products = free_cluster(), others = free_cluster();
  products.rules = {
      {.operators = {"gemm", "linear_*", "grouped_linear_*", "mla_attention_*"}, .type = {}, .seconds_per_call = 1.0},
      {.operators = {"*"}, .type = {}}};
  others.rules = {{.operators = {"rmsnorm_*"}, .type = {}, .seconds_per_call = 1.0}, {.operators = {"*"}, .type = {}}};
  std::vector<double> slowed;  // RunForecast::slowed_by_links of the last forecast
  const auto passes_of = [&slowed](Cluster cluster, const char* schedule, int num_sms) {
    cluster.num_sms = num_sms;
    std::vector<double> passes;
    const Layout layout{"pp4",
                        4,
                        {.pp = 4},
                        {std::string("--parallelism.pipeline_parallel_schedule=") + schedule, "--model.args.n_layers=8",
                         "--training.local_batch_size=8", "--parallelism.pipeline_parallel_degree=4",
                         "--parallelism.pipeline_parallel_microbatch_size=1"}};
    const RunForecast found = forecast(layout, cluster);
    for (const RankForecast& rank : found.step.ranks) {
      passes.push_back(rank.seconds_of("forward") + rank.seconds_of("backward"));
    }
    slowed = found.slowed_by_links;
    return passes;
  };
  // Ranks are a row in a V, and a ring in interleaved stages.
  const std::map<std::string, std::vector<int>> links = {
      {"1F1B", {2, 4, 4, 2}}, {"DualPipeV", {2, 4, 4, 2}}, {"Interleaved1F1B", {4, 4, 4, 4}}};
  for (const auto& [schedule, of_ranks] : links) {
    const std::vector<double> without = passes_of(products, schedule.c_str(), 0);
    const std::vector<double> with = passes_of(products, schedule.c_str(), 100);
    for (std::size_t pp = 0; pp < 4; ++pp) {
      EXPECT_GT(without[pp], 0.0);
      EXPECT_NEAR(with[pp], without[pp] * 100.0 / (100.0 - of_ranks[pp]), 1e-12 * with[pp]) << schedule << " " << pp;
      EXPECT_NEAR(slowed.at(pp), 100.0 / (100.0 - of_ranks[pp]), 1e-12) << schedule << " " << pp;
    }
    EXPECT_EQ(passes_of(others, schedule.c_str(), 100), passes_of(others, schedule.c_str(), 0));
  }
}

/// Returns loads of which the busiest of 2 or more ranks has `load` times the mean in one layer, and others the mean.
ExpertLoads loads_with(const JobConfig& job, std::int64_t busy_layer, std::int64_t num_ranks, double load) {
  const std::int64_t experts = job.model.args.num_experts, of_rank = experts / num_ranks;
  ExpertLoads loads{.step = 1, .tokens = {}, .path = "loads.json"};
  for (std::int64_t layer = 1; layer < job.model.args.n_layers; ++layer) {
    std::vector<double>& tokens = loads.tokens[fmt::format("layers.{}.moe", layer)];
    tokens.assign(static_cast<std::size_t>(experts), 1.0);
    if (layer != busy_layer) continue;
    const auto busy = tokens.begin() + of_rank;  // of the second rank
    const auto all = static_cast<double>(experts), some = static_cast<double>(of_rank);
    std::ranges::fill(tokens, (all - some * load) / (all - some));
    std::fill(busy, busy + of_rank, load);
  }
  return loads;
}

TEST(RunForecast, LoadsAreOfAllMoeLayersAlsoThoseOfMultiTokenPrediction) {
  const JobConfig job = config_of_ranks({"--model.args.num_mtp_modules=1", "--parallelism.expert_parallel_degree=4"});
  ExpertLoads loads = loads_with(job, -1, 4, 1.0);
  expect_error([&] { busiest_rank(loads, job); }, {"loads.json", "3 MoE layers", "has 4"});
  loads.tokens["mtp.0.moe"] = loads_with(job, 1, 4, 2.0).tokens.at("layers.1.moe");
  const BusiestRank busiest = busiest_rank(loads, job);
  EXPECT_EQ(busiest.layer, "mtp.0.moe");
  EXPECT_DOUBLE_EQ(busiest.most, 2.0);
  EXPECT_DOUBLE_EQ(busiest.mean, (1.0 + 1.0 + 1.0 + 2.0) / 4.0);
  auto renamed = loads.tokens.extract("layers.2.moe");
  renamed.key() = "layers.7.moe";
  loads.tokens.insert(std::move(renamed));
  expect_error([&] { busiest_rank(loads, job); }, {"loads.json", "no loads of layers.2.moe", "another model"});
}

TEST(RunForecast, EqualLoadsAreABalancedLoad) {
  for (const Layout& layout : layouts()) {
    SCOPED_TRACE(layout.name);
    const JobConfig job = config_of_ranks(layout.overrides);
    const ExpertLoads loads = loads_with(job, -1, layout.degrees.ep, 1.0);
    const PlannedRun run{job, Device::kCpu, resolve(layout.degrees, layout.num_ranks)};
    const RunForecast found = forecast_run(run, costly_cluster(), {RoutingKind::kUniform, &loads});
    EXPECT_EQ(found.seconds, forecast(layout, costly_cluster()).seconds);
  }
}

// Where only the products of experts take time, one of three layers with twice the load adds a third to the step. The
// same holds for dispatches and combines.
TEST(RunForecast, ALayerTakesAsLongAsItsBusiestRank) {
  Cluster products = free_cluster(), links = free_cluster();
  products.rules = {{.operators = {"grouped_linear_*"}, .type = {}, .flop_per_second = 1e9},
                    {.operators = {"*"}, .type = {}}};
  links.direct_bytes_per_second = 1e9;
  const JobConfig job = config_of_ranks(
      {"--parallelism.expert_parallel_comm_backend=direct", "--parallelism.expert_parallel_capacity_factor=1.0"});
  const PlannedRun run{job, Device::kCpu, resolve({.ep = 4}, 4)};
  for (const Cluster& cluster : {products, links}) {
    const double balanced = forecast_run(run, cluster, RoutingKind::kUniform).seconds;
    EXPECT_GT(balanced, 0.0);
    for (const double load : {1.25, 2.0}) {
      const ExpertLoads loads = loads_with(job, 2, 4, load);
      EXPECT_NEAR(forecast_run(run, cluster, {RoutingKind::kUniform, &loads}).seconds,
                  balanced * (1.0 + (load - 1.0) / 3.0), 1e-9 * balanced);
    }
  }
}

// A planned rank of a pipeline stands for others, but not with its loads.
TEST(RunForecast, OnlyTheRankThatHasABusyLayerIsSlower) {
  const JobConfig job = config_of_ranks({"--parallelism.pipeline_parallel_degree=4", "--model.args.n_layers=13",
                                         "--training.local_batch_size=16", "--parallelism.expert_parallel_degree=2"});
  const PlannedRun run{job, Device::kCpu, resolve({.pp = 4, .ep = 2}, 8)};
  const RunForecast balanced = forecast_run(run, costly_cluster(), RoutingKind::kUniform);
  std::set<std::size_t> slower;  // ranks, of each busy layer
  for (std::int64_t layer = 1; layer < job.model.args.n_layers; ++layer) {
    const ExpertLoads loads = loads_with(job, layer, 2, 1.5);
    const RunForecast found = forecast_run(run, costly_cluster(), {RoutingKind::kUniform, &loads});
    std::size_t num_slower = 0;
    for (std::size_t pp = 0; pp < 4; ++pp) {
      const double before = balanced.step.ranks[pp].seconds_of("forward");
      if (found.step.ranks[pp].seconds_of("forward") == before) continue;
      EXPECT_GT(found.step.ranks[pp].seconds_of("forward"), before);
      slower.insert(pp);
      ++num_slower;
    }
    EXPECT_EQ(num_slower, 1u) << layer;
  }
  EXPECT_EQ(slower.size(), 4u);
}

TEST(RunForecast, TransfersAreBoundByTheSlowerLink) {
  Cluster cluster = free_cluster();
  cluster.domain_bytes_per_second = 100.0;
  cluster.network_bytes_per_second = 10.0;
  const JobConfig job = config_of_ranks({});
  const auto seconds = [&](const MeshDegrees& degrees, std::int64_t ranks, const char* kind, const char* axis) {
    const TransferTimes times(cluster, job, resolve(degrees, ranks), 0, {});
    return times.seconds({.kind = kind, .axis = axis, .bytes = 1600.0, .choices = {}, .pass = {}});
  };
  const MeshDegrees shard;
  EXPECT_DOUBLE_EQ(seconds(shard, 8, "all_gather", "dp_shard_cp"), 1600.0 * 7 / 8 / 100);
  EXPECT_DOUBLE_EQ(seconds(shard, 8, "all_reduce", "dp_shard_cp"), 2 * 1600.0 * 7 / 8 / 100);
  // Two domains: half of the tensor comes in over 8 links.
  EXPECT_DOUBLE_EQ(seconds(shard, 16, "reduce_scatter", "dp_shard_cp"), std::max(14.0, 1600.0 / 2 / 8 / 10));
  EXPECT_DOUBLE_EQ(seconds(shard, 16, "all_to_all", "dp_shard_cp"), 1600.0 * 8 / 16 / 10);
  // Ranks of a replica lie in a domain, and replicas in different ones.
  EXPECT_DOUBLE_EQ(seconds({.dp_replicate = 2}, 16, "all_reduce", "dp_replicate"), 2 * 1600.0 / 2 / 10);
  EXPECT_DOUBLE_EQ(seconds({.pp = 2}, 16, "send", "pp"), 160.0);
  EXPECT_DOUBLE_EQ(seconds({.pp = 2}, 8, "send", "pp"), 16.0);
  // Domains of 8 and of 4 ranks: the fuller one's links carry most, the emptier one has fewer network cards.
  EXPECT_DOUBLE_EQ(seconds(shard, 12, "all_gather", "dp_shard_cp"), 1600.0 / 2 / 4 / 10);
  EXPECT_DOUBLE_EQ(seconds(shard, 12, "all_to_all", "dp_shard_cp"), 1600.0 * 8 / 12 / 10);
  cluster.network_bytes_per_second = 1e30;
  EXPECT_DOUBLE_EQ(seconds(shard, 12, "all_gather", "dp_shard_cp"), 1600.0 * 7 / 8 / 100);
  // A message is not faster between domains than within one.
  cluster.domain_bytes_per_second_of["send"] = 20.0;
  EXPECT_DOUBLE_EQ(seconds({.pp = 2}, 16, "send", "pp"), 1600.0 / 20.0);
}

TEST(RunForecast, DirectIsCutAtDomains) {
  const auto domain_of = [](const Overrides& more, int gpus_per_domain) {
    Cluster cluster = free_cluster();
    cluster.gpus_per_domain = gpus_per_domain;
    JobConfig job = config_of_ranks(more);
    set_ranks_per_domain(job, 12, cluster);
    return job.parallelism.expert_parallel_ranks_per_domain;
  };
  const std::string ep = "--parallelism.expert_parallel_degree=4";
  const std::string direct = "--parallelism.expert_parallel_comm_backend=direct";
  EXPECT_EQ(domain_of({ep, direct}, 4), 0);
  EXPECT_EQ(domain_of({ep, direct}, 2), 2);
  EXPECT_EQ(domain_of({ep}, 2), 0);
  EXPECT_EQ(domain_of({ep, direct, "--parallelism.expert_parallel_ranks_per_domain=4"}, 2), 4);
  EXPECT_EQ(domain_of({ep, direct}, 6), 2);  // ranks 4 to 7 are in two domains, as they would be on two nodes
  expect_error([&] { domain_of({ep, direct}, 3); }, {"4 ranks", "domains of 3"});
}

// A calibration of a Hopper has blocks of 128.
TEST(RunForecast, BlocksOf32NeedARateOfTheirOwn) {
  Cluster cluster = costly_cluster();
  cluster.precisions = {"mxfp8"};
  const auto forecast_with = [&](const Overrides& more) {
    Overrides all = {"--model.converters=quantize.linear.mx,quantize.grouped_mm.mx",
                     "--training.mixed_precision_param=bfloat16", "--quantize.linear.mx.unaligned=bf16",
                     "--quantize.grouped_mm.mx.unaligned=bf16"};
    all.insert(all.end(), more.begin(), more.end());
    const JobConfig job = config_of_ranks(all);
    forecast_run({job, Device::kCpu, resolve({}, 1)}, cluster, RoutingKind::kUniform);
  };
  const std::string small = "--quantize.grouped_mm.mx.block_shape=1x32";
  EXPECT_NO_THROW(forecast_with({small}));  // the cluster has a rule for everything
  cluster.rules = {{.operators = {"*"}, .type = "bfloat16"}, {.operators = {"*"}, .type = "float32"}};
  expect_error([&] { forecast_with({small}); }, {"blocks of 32", cluster.name, "128x128"});
}

TEST(RunForecast, WhatAGpuHasNoKernelsForIsRefused) {
  const auto refused = [](const Overrides& more, const std::vector<std::string>& parts) {
    Cluster cluster = free_cluster();
    cluster.precisions = {"bf16"};
    cluster.num_sms = 8;
    const JobConfig job = config_of_ranks(more);
    const MeshDegrees degrees = resolve(job.mesh_degrees(), 4);
    expect_error([&] { forecast_run({job, Device::kCpu, degrees}, cluster, RoutingKind::kUniform); }, parts);
  };
  refused({"--model.converters=quantize.linear.mx,quantize.grouped_mm.mx", "--training.mixed_precision_param=bfloat16"},
          {"no kernels for mxfp8", "bf16"});
  refused({"--training.mixed_precision_param=bfloat16", "--parallelism.expert_parallel_degree=4",
           "--parallelism.expert_parallel_comm_backend=direct", "--parallelism.expert_parallel_num_sms=8"},
          {"expert_parallel_num_sms is 8", "8 SMs"});
}

JobConfig config_with_backend(const std::string& backend) {
  return config_of_ranks(
      {"--parallelism.expert_parallel_comm_backend=" + backend, "--parallelism.expert_parallel_num_sms=4"});
}

TransferTimes times_of_four_ranks(const Cluster& cluster, const JobConfig& job) {
  const MeshDegrees degrees = resolve({.ep = 4}, 4);
  return {cluster, job, degrees, 0, experts_spread(cluster, job, degrees, RoutingKind::kForced)};
}

/// Returns how long a dispatcher's call between four ranks takes if a row has one byte.
double seconds_of_dispatch(const Cluster& cluster, const JobConfig& job, const std::string& kind) {
  const ModelConfig& model = job.model.args;
  return times_of_four_ranks(cluster, job)
      .seconds({.kind = kind,
                .axis = "ep",
                .num_ranks = 4,
                .bytes = 1.0,
                .choices = {.num_experts = model.num_experts, .top_k = model.top_k},
                .pass = {}});
}

// One rate is 1 byte per second, or one call takes 1 s, and all else is free. A token chooses 3 of 8 experts in turn.
// On average 2.25 of a token's choices are on other ranks, and 1.5 other ranks have any of them. Half of the tokens
// have a choice on their own rank.
TEST(RunForecast, ADispatchMovesWhatItsBackendMoves) {
  struct Case {
    const char* backend;
    double Cluster::*cost;
    int gpus_per_domain;
    double out, back;  // seconds of calls that send rows to experts, and of those that add them up
  };
  for (const Case& one : {
           // A row crosses once to the only other domain, or to each of several, and once to each rank.
           Case{"direct", &Cluster::network_bytes_per_second, 2, 1.0, 1.0},
           Case{"direct", &Cluster::network_bytes_per_second, 1, 1.5, 1.5},
           Case{"direct", &Cluster::direct_bytes_per_second, 2, 1.5, 1.5},
           // 4 SMs write and read a row for each choice, and add up a sum of each rank.
           Case{"direct", &Cluster::sm_written_per_second, 2, 0.75, 0.0},
           Case{"direct", &Cluster::sm_read_per_second, 2, 0.0, 0.75},
           Case{"direct", &Cluster::sm_summed_per_second, 2, 0.0, (0.5 + 1.5) / 4.0},
           Case{"direct", &Cluster::seconds_per_dispatch, 2, 1.0, 1.0},
           // A row crosses once for each choice. The network is not faster than links within a domain.
           Case{"standard", &Cluster::network_bytes_per_second, 2, 1.5, 1.5},
           Case{"standard", &Cluster::domain_bytes_per_second, 2, 1.5, 1.5},
           Case{"standard", &Cluster::domain_bytes_per_second, 3, 2.25 - 0.75, 2.25 - 0.75},
           Case{"standard", &Cluster::domain_bytes_per_second, 4, 2.25, 2.25},
       }) {
    Cluster cluster = free_cluster();
    cluster.gpus_per_domain = one.gpus_per_domain;
    cluster.*one.cost = 1.0;
    const JobConfig job = config_with_backend(one.backend);
    for (const auto& [kind, seconds] : {std::pair{"dispatch", one.out},
                                        {"dispatch_again", one.out},
                                        {"combine_backward", one.out},
                                        {"combine", one.back},
                                        {"dispatch_backward", one.back}}) {
      EXPECT_NEAR(seconds_of_dispatch(cluster, job, kind), seconds, 1e-15)
          << one.backend << " " << kind << " of " << one.gpus_per_domain;
    }
  }
}

// Its tables are kept for all other calls.
TEST(RunForecast, OnlyAStandardDispatchWaitsForTheHost) {
  Cluster cluster = free_cluster();
  cluster.seconds_per_host_plan = 2.0;
  cluster.seconds_per_transfer = 1.0;
  const JobConfig job = config_with_backend("standard");
  EXPECT_DOUBLE_EQ(seconds_of_dispatch(cluster, job, "dispatch"), 2.0 + 1.0 + 1.0);  // with an exchange of counts
  for (const char* kind : {"dispatch_again", "combine", "combine_backward", "dispatch_backward"}) {
    EXPECT_DOUBLE_EQ(seconds_of_dispatch(cluster, job, kind), 1.0) << kind;
  }
}

TEST(RunForecast, ADispatchCostsOperatorsWhatItsBackendOrItsEngineSays) {
  Cluster cluster = free_cluster();
  cluster.direct_overlap_cost = 0.5;
  cluster.overlap_cost = 0.25;
  const JobConfig direct = config_with_backend("direct"), standard = config_with_backend("standard");
  EXPECT_EQ(times_of_four_ranks(cluster, direct).dispatch_overlap_cost(), 0.5);
  EXPECT_EQ(times_of_four_ranks(cluster, standard).dispatch_overlap_cost(), 0.25);
  for (const double of_engine : {0.0, 0.125}) {
    cluster.engine.dispatch_overlap_cost = of_engine;
    EXPECT_EQ(times_of_four_ranks(cluster, direct).dispatch_overlap_cost(), of_engine);
    EXPECT_EQ(times_of_four_ranks(cluster, standard).dispatch_overlap_cost(), of_engine);
  }
}

TEST(RunForecast, TheSpreadHasAllLinesOfAllMicroBatches) {
  for (const Layout& layout : layouts()) {
    SCOPED_TRACE(layout.name);
    Layout two = layout;
    two.overrides.emplace_back("--training.local_batch_size=2");
    const std::int64_t batches = layout.num_ranks / (layout.degrees.tp * layout.degrees.cp * layout.degrees.pp);
    two.overrides.push_back(fmt::format("--training.global_batch_size={}", 4 * batches));
    const RunForecast result = forecast(two, costly_cluster());
    for (const ForecastLine& line : result.step.ranks.front().lines) {
      EXPECT_NEAR(line.error_seconds, kUnmeasuredError * line.seconds, 1e-12) << line.name;
    }
    double flop = 0.0;
    for (const ForecastLine& line : result.step.ranks[result.step.slowest].lines) flop += line.flop;
    EXPECT_DOUBLE_EQ(result.executed_flop, flop);
  }
}

}  // namespace
}  // namespace tessera
