// Compares a search with all layouts of a small space.
#include "plan/layout_search.h"

#include <gtest/gtest.h>

#include <span>

#include "base/median.h"
#include "config/job_config.h"
#include "tests/expect_error.h"
#include "tests/step/small_model.h"

namespace tessera {
namespace {

JobConfig config_to_search(const std::vector<std::string>& overrides = {}) {
  static const std::string kToml = std::string(kSmallModel) + R"(
[training]
global_batch_size = 16
seq_len = 32
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

/// Returns the speed of every layout of 4 ranks, and its memory, without a search.
std::vector<std::pair<double, double>> all_layouts(const Cluster& cluster) {
  std::vector<std::pair<double, double>> found;
  for (const char* degrees :
       {"1 1 1", "1 1 2", "1 1 4", "1 2 1", "1 2 2", "1 2 4", "2 1 1", "2 1 2", "2 2 1", "2 2 2", "4 1 1"}) {
    const std::string pp(degrees, 1), tp(degrees + 2, 1), ep(degrees + 4, 1);
    for (const char* batch : {"1", "2", "4"}) {
      for (const char* schedule : {"1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"}) {
        if (pp == "1" && schedule != std::string("1F1B")) continue;
        for (const char* mode : {"none", "selective", "full"}) {
          try {
            const JobConfig job = config_to_search(
                {"--parallelism.pipeline_parallel_degree=" + pp, "--parallelism.tensor_parallel_degree=" + tp,
                 "--parallelism.expert_parallel_degree=" + ep, std::string("--training.local_batch_size=") + batch,
                 std::string("--parallelism.pipeline_parallel_microbatch_size=") + batch,
                 std::string("--parallelism.pipeline_parallel_schedule=") + schedule,
                 std::string("--activation_checkpoint.mode=") + mode});
            job.validate();
            const MeshDegrees resolved = resolve(job.mesh_degrees(), 4);
            job.validate_on(resolved);
            const RunForecast forecast = forecast_run({job, Device::kCpu, resolved}, cluster, RoutingKind::kUniform);
            if (static_cast<double>(forecast.memory.total()) > cluster.memory_bytes) continue;
            found.emplace_back(-forecast.tokens_per_second_per_gpu(), static_cast<double>(forecast.memory.total()));
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

TEST(LayoutSearch, FindsWhatTryingAllFinds) {
  const JobConfig job = config_to_search();
  // Half of the layouts fit the second one. What they take depends on the machine's threads.
  std::vector<double> sizes;
  for (const auto& [speed, bytes] : all_layouts(cluster_of(1e12))) sizes.push_back(bytes);
  for (const double memory : {1e12, median(sizes)}) {
    const Cluster cluster = cluster_of(memory);
    const FoundLayouts found =
        search_layouts({.job = job, .num_ranks = 4, .cluster = cluster, .device = Device::kCpu, .num_threads = 2});
    std::vector<std::pair<double, double>> speeds;
    for (const FoundLayout& layout : found.fitting) {
      speeds.emplace_back(-layout.tokens_per_second_per_gpu, layout.memory_bytes);
    }
    const auto expected = all_layouts(cluster);
    ASSERT_GT(expected.size(), 3u);
    if (memory > 1e9) {
      EXPECT_EQ(speeds, expected);
      EXPECT_EQ(found.num_too_large, 0u);
      continue;
    }
    // Modes and schedules that take more memory are not tried where one that takes less does not fit.
    EXPECT_EQ(speeds.front(), expected.front());
    EXPECT_LT(speeds.size(), all_layouts(cluster_of(1e12)).size());
    EXPECT_GT(found.num_too_large, 0u);
    for (const auto& [speed, bytes] : speeds) EXPECT_LE(bytes, memory);
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

// Where only bytes of operators take time, only faster memory is a gain.
TEST(LayoutSearch, SensitivitiesAreOfWhatTakesTime) {
  const JobConfig job = config_to_search({"--training.local_batch_size=1"});
  Cluster cluster = cluster_of(1e12);
  cluster.domain_bytes_per_second = cluster.network_bytes_per_second = cluster.direct_bytes_per_second = 1e30;
  cluster.sm_written_per_second = cluster.sm_read_per_second = cluster.sm_summed_per_second = 1e30;
  const std::vector<Sensitivity> found =
      sensitivities({job, Device::kCpu, resolve({}, 4)}, cluster, RoutingKind::kUniform);
  ASSERT_GT(found.size(), 4u);
  EXPECT_EQ(found.front().change, "memory 10 % faster");
  EXPECT_NEAR(found.front().gain, 0.1, 1e-6);
  for (const Sensitivity& one : std::span(found).subspan(1)) EXPECT_NEAR(one.gain, 0.0, 1e-9) << one.change;
}

TEST(LayoutSearch, ARunThatNoLayoutMakesPossibleIsRefused) {
  const JobConfig job = config_to_search({"--parallelism.context_parallel_degree=3"});
  const Cluster cluster = cluster_of(1e12);
  expect_error([&] { search_layouts({.job = job, .num_ranks = 4, .cluster = cluster, .device = Device::kCpu}); },
               {"no layout is possible", "context_parallel_degree"});
}

}  // namespace
}  // namespace tessera
