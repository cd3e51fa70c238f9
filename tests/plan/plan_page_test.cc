// Makes pages of forecasts, and looks at them in a browser.
#include "plan/report/plan_page.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/browser.h"
#include "tests/expect_error.h"
#include "tests/step/small_model.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

/// Returns a cluster on which operators and transfers take some time.
Cluster slow_cluster() {
  Cluster cluster;
  cluster.name = "GPU";
  cluster.path = "slow.toml";
  cluster.gpus_per_domain = 2;
  cluster.num_sms = 100;
  cluster.memory_bytes = 1e12;
  cluster.dollars_per_gpu_hour = 2.0;
  cluster.peak_flop_per_second = 1e12;
  cluster.domain_bytes_per_second = cluster.direct_bytes_per_second = 1e9;
  cluster.network_bytes_per_second = 1e8;
  cluster.sm_written_per_second = cluster.sm_read_per_second = cluster.sm_summed_per_second = 1e8;
  cluster.seconds_per_transfer = cluster.seconds_per_dispatch = 1e-5;
  cluster.overlap_cost = 0.5;
  cluster.straggler = 0.01;
  cluster.calibration.seconds_per_operator = 1e-6;
  cluster.rules = {
      {.operators = {"*"}, .type = {}, .flop_per_second = 1e11, .bytes_per_second = 1e9, .seconds_per_call = 1e-6}};
  return cluster;
}

struct Planned {
  JobConfig job;
  MeshDegrees degrees;
  Cluster cluster = slow_cluster();
  RunForecast forecast;
};

Planned planned(const std::vector<std::string>& overrides, std::int64_t num_ranks) {
  std::vector<std::string> all = {"--training.local_batch_size=4", "--training.seq_len=32",
                                  "--parallelism.pipeline_parallel_microbatch_size=1"};
  all.insert(all.end(), overrides.begin(), overrides.end());
  Planned result{.job = parse_job_config(kSmallModel, all), .degrees = {}, .forecast = {}};
  result.degrees = resolve(result.job.mesh_degrees(), num_ranks);
  result.forecast =
      forecast_run({result.job, Device::kCpu, result.degrees}, result.cluster, RoutingKind::kUniform, true);
  return result;
}

const std::vector<std::vector<std::string>>& meshes() {
  static const std::vector<std::vector<std::string>> all = {
      {},
      {"--parallelism.expert_parallel_degree=4"},
      {"--parallelism.pipeline_parallel_degree=2", "--parallelism.expert_parallel_degree=2"},
      {"--parallelism.tensor_parallel_degree=2", "--activation_checkpoint.mode=full"}};
  return all;
}

TEST(PlanPage, PartsAddUpToTheStep) {
  for (const auto& mesh : meshes()) {
    const Planned of = planned(mesh, 4);
    double sum = 0.0;
    for (const StepPart& part : parts_of_step(of.forecast, of.cluster)) sum += part.seconds;
    EXPECT_NEAR(sum, of.forecast.seconds, 1e-9 * of.forecast.seconds) << (mesh.empty() ? "" : mesh.front());
  }
}

// Operators of a rank run one after the other, and all of them take what the passes of a micro-batch do.
TEST(PlanPage, LanesAddUpToThePasses) {
  for (const auto& mesh : meshes()) {
    SCOPED_TRACE(mesh.empty() ? "" : mesh.front());
    const Planned of = planned(mesh, 4);
    const RankForecast& rank = of.forecast.step.ranks.front();
    double before = 0.0, computed = 0.0, planned_seconds = 0.0;
    for (const ForecastEvent& event : rank.events) {
      if (event.lane >= ForecastEvent::Lane::kDomain) continue;
      EXPECT_GE(event.begin, before - 1e-12) << event.name;
      before = event.begin + event.seconds;
      if (event.stage >= 0) computed += event.seconds;
    }
    for (const ForecastLine& line : rank.lines) {
      if (line.stage >= 0 && !line.is_transfer) planned_seconds += line.seconds;
    }
    EXPECT_NEAR(computed, planned_seconds / of.forecast.schedule.num_micro_batches, 1e-9 * planned_seconds);
    double whole = 0.0;
    for (const StageTimes& stage : rank.stages) whole += stage.forward + stage.backward + stage.weight_gradients;
    EXPECT_GE(before, whole);
  }
}

TEST(PlanPage, AValidationIsRead) {
  const data::TemporaryFolder scratch;
  const std::filesystem::path path = scratch / "v.json";
  write_whole_file(path, R"({"format": "tessera validation", "version": 1,
                             "runs": {"a": {"measured": 10, "predicted": 11}}})");
  const std::vector<ValidatedRun> runs = read_validation(path);
  ASSERT_EQ(runs.size(), 1u);
  EXPECT_EQ(runs[0].predicted, 11.0);
  write_whole_file(path,
                   R"({"format": "tessera validation", "version": 1, "runs": {"a": {"measured": 0, "predicted": 1}}})");
  expect_error([&] { read_validation(path); }, {path.string(), "runs.a.measured"});
  expect_error([&] { read_validation(scratch / "none.json"); }, {"none.json", "forecast_gpu.py"});
}

class PlanBrowser : public browser_test::Browser {};

TEST_F(PlanBrowser, EverythingIsLegibleOnAPhoneAndOnADesktop) {
  const std::vector<ValidatedRun> validation = {{100.0, 103.0}, {50.0, 48.0}};
  for (const auto& mesh : meshes()) {
    const Planned of = planned(mesh, 4);
    const auto layout = [&](double rate, double gib) {
      return FoundLayout{.config = of.job, .tokens_per_second_per_gpu = rate, .memory_bytes = gib * 1073741824.0};
    };
    const std::vector<FoundLayout> layouts = {layout(200.0, 9.0), layout(180.0, 10.0), layout(150.0, 5.0)};
    const std::string html = plan_page({.title = "small on 4 GPU",
                                        .layout = describe(of.degrees),
                                        .forecast = of.forecast,
                                        .cluster = of.cluster,
                                        .layouts = layouts,
                                        .validation = validation});
    for (const auto& [width, height] : {std::pair{360, 740}, std::pair{1280, 800}}) {
      SCOPED_TRACE(fmt::format("{}, {} px", mesh.empty() ? "" : mesh.front(), width));
      const nlohmann::json page = measure(html, width, height);
      ASSERT_TRUE(page.is_object());
      expect_legible(page, width, height);
      EXPECT_EQ(page["svgs"].size(), 5u);
      EXPECT_THAT(page["verdict"]["text"].get<std::string>(), HasSubstr("tokens/s per GPU"));
    }
  }
}

}  // namespace
}  // namespace tessera
