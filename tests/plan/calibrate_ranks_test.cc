// Measures two ranks of this test, and predicts steps with what ranks measure.
#include "plan/measure/calibrate_ranks.h"

#include <gtest/gtest.h>

#include "base/error.h"
#include "base/version.h"
#include "config/job_config.h"
#include "plan/run_forecast.h"
#include "tensor/parallel.h"
#include "tests/comm/ranks.h"
#include "tests/expect_error.h"
#include "tests/step/small_model.h"

namespace tessera {
namespace {

/// Measures two ranks. What else runs on the machine may make a larger transfer the faster one, so there are some
/// tries.
void calibrate(std::vector<RankValue> (&values)[2]) {
  constexpr int kTries = 5;
  for (int i = 1;; ++i) {
    try {
      comm_test::with_ranks(2, [&](ProcessGroup& world) { values[world.rank()] = calibrate_ranks(world, nullptr); });
      return;
    } catch (const Error& error) {
      if (i == kTries || std::string(error.what()).find("took no longer for more bytes") == std::string::npos) throw;
    }
  }
}

TEST(CalibrateRanks, RanksMeasureTransfersAndEachOther) {
  std::vector<RankValue> values[2];
  calibrate(values);
  Calibration calibration;
  calibration.between_ranks = values[0];
  const auto value = [&](const std::string& name) { return calibration.between_ranks_value(name); };
  EXPECT_EQ(value("ranks"), 2.0);
  for (const char* kind : {"all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send", "domain"}) {
    EXPECT_GT(value(std::string(kind) + ".gb_per_s"), 0.0) << kind;
    EXPECT_GE(value(std::string(kind) + ".microseconds"), 0.0) << kind;
  }
  const Cluster cluster = cluster_of_cpus(calibration, 2);  // throws if a value is missing
  EXPECT_EQ(cluster.overlap_cost, value("overlap_cost"));
  EXPECT_DOUBLE_EQ(cluster.slowest_of(2), value("slowest_over_mean"));
  ASSERT_EQ(values[0].size(), values[1].size());
  for (std::size_t i = 0; i < values[0].size(); ++i) {
    EXPECT_EQ(values[0][i].name, values[1][i].name);
    EXPECT_EQ(values[0][i].value, values[1][i].value) << values[0][i].name;
    EXPECT_FALSE(values[0][i].unit.empty() || values[0][i].source.empty()) << values[0][i].name;
  }
}

TEST(CalibrateRanks, ALinkCarriesWhatTheOtherRanksHave) {
  for (const auto& [kind, bytes] : {std::pair{"all_gather", 700.0},
                                    {"reduce_scatter", 700.0},
                                    {"all_reduce", 1400.0},
                                    {"all_to_all", 700.0},
                                    {"send", 800.0}}) {
    EXPECT_EQ(bytes_of_link(kind, 800.0, 8.0), bytes) << kind;
  }
}

TEST(CalibrateRanks, ProductsLoseAtMostTheCallBesideThem) {
  EXPECT_EQ(lost_part(4.0, 6.0, 7.0), 0.25);
  EXPECT_EQ(lost_part(4.0, 6.0, 11.0), 1.0);
  EXPECT_EQ(lost_part(4.0, 6.0, 5.0), 0.0);
}

TEST(CalibrateRanks, TheStragglerIsTheDeviationThatMakesTheSlowestRank) {
  const double seconds[] = {1.0, 3.0, 2.0};
  EXPECT_EQ(slowest_over_mean(seconds), 1.5);
  EXPECT_DOUBLE_EQ(straggler_of(seconds), 0.5 / expected_maximum(3));
}

/// Returns a calibration of two ranks in which operators take no time, and all transfers but all-gathers 1e9 bytes per
/// second.
Calibration of_two_ranks(const JobConfig& job, const MeshDegrees& degrees, double all_gather) {
  Calibration calibration;
  calibration.path = "c.json";
  calibration.program = version();
  calibration.threads = std::max(1, num_cores() / 2);
  const TrainingStep step(job, std::make_shared<Mesh>(Mesh::planned(degrees, 0)));
  for (const RecordedOperator& call : step.dry_run().operators()) {
    for (const std::string& of_class : {class_of(call), class_of(in_later_micro_batch(call))}) {
      calibration.operators[of_class] = {.most_bytes = 1e12};
    }
  }
  for (const char* kind : {"reduce_scatter", "all_reduce", "all_to_all", "send", "domain"}) {
    calibration.between_ranks.push_back({std::string(kind) + ".gb_per_s", 1.0, "", "", ""});
  }
  for (const auto& [name, value] : {std::pair{"all_gather.gb_per_s", all_gather},
                                    {"ranks", 2.0},
                                    {"domain.microseconds", 0.0},
                                    {"overlap_cost", 1.0},
                                    {"straggler", 0.0}}) {
    calibration.between_ranks.push_back({name, value, "", "", ""});
  }
  return calibration;
}

TEST(CalibrateRanks, ATransferHasTheRateOfItsKind) {
  const JobConfig job = parse_job_config(kSmallModel, {"--training.local_batch_size=2", "--training.seq_len=32"});
  const MeshDegrees degrees = resolve(job.mesh_degrees(), 2);
  const auto gathers = [&](double rate) {
    const RunForecast forecast = forecast_on_cpu(job, degrees, of_two_ranks(job, degrees, rate));
    double all_gathers = 0.0, others = 0.0;
    for (const ForecastLine& line : forecast.step.ranks.front().lines) {
      (line.name.starts_with("all_gather") ? all_gathers : others) += line.seconds;
    }
    EXPECT_NEAR(forecast.seconds, all_gathers + others, 1e-12);
    return std::pair(all_gathers, others);
  };
  const auto [slow, others] = gathers(1.0);
  const auto [fast, same] = gathers(4.0);
  EXPECT_GT(slow, 0.0);
  EXPECT_GT(others, 0.0);
  EXPECT_NEAR(fast, slow / 4.0, 1e-9 * slow);
  EXPECT_EQ(others, same);
}

TEST(CalibrateRanks, OtherRanksThanMeasuredAreRefused) {
  const JobConfig job = parse_job_config(kSmallModel, {});
  Calibration calibration;
  calibration.threads = 1000;  // ranks that share a CPU have fewer, but that is not what is wrong
  calibration.path = "c.json";
  calibration.between_ranks = {{"ranks", 2.0, "", "", ""}};
  const MeshDegrees degrees = resolve(job.mesh_degrees(), 4);
  expect_error([&] { forecast_on_cpu(job, degrees, calibration); }, {"c.json", "2 ranks", "4", "mpirun -np 4"});
  calibration.between_ranks.clear();
  expect_error([&] { forecast_on_cpu(job, degrees, calibration); }, {"c.json", "1 rank,", "4", "mpirun -np 4"});
}

}  // namespace
}  // namespace tessera
