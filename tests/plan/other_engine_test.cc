// Reads files of other engines, and checks how they change times.
#include "plan/other_engine.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "base/file.h"
#include "plan/cluster.h"
#include "plan/step_forecast.h"
#include "tests/expect_error.h"
#include "tests/log_of.h"

namespace tessera {
namespace {

constexpr std::int64_t kDim = 16;

/// A model whose experts have this width.
ModelConfig model_with(std::int64_t moe_inter_dim) {
  ModelConfig model;
  model.dim = kDim;
  model.moe_inter_dim = moe_inter_dim;
  return model;
}

class OtherEngineFile : public ::testing::Test {
 protected:
  void TearDown() override { std::filesystem::remove(path_); }

  /// Returns a cluster on which every operator takes a second, with an engine of this text.
  Cluster cluster_with(const std::string& text, std::int64_t moe_inter_dim = 2) {
    write_whole_file(path_, "name = \"another\"\nsource = \"a test\"\n" + text);
    Cluster cluster;
    cluster.name = "GPU";
    cluster.rules = {{.operators = {"*"}, .type = {}, .seconds_per_call = 1.0}};
    use_engine(path_, model_with(moe_inter_dim), cluster);
    return cluster;
  }

  const std::filesystem::path path_ =
      std::filesystem::path(::testing::TempDir()) / fmt::format("engine_{}.toml", getpid());
};

RecordedOperator named(const std::string& name, const std::string& pass) {
  return {.name = name,
          .operands = {{{8, kDim}, DType::kBFloat16}, {{kDim, 4}, DType::kBFloat16}, {{8, 4}, DType::kBFloat16}},
          .pass = pass};
}

TEST_F(OtherEngineFile, FactorsAreOfNamesAndPasses) {
  const Cluster cluster = cluster_with(R"(
[[factor]]
names = ["gemm", "swiglu_*"]
times = 2
source = "a test"
[[factor]]
names = ["gemm"]
pass = "backward"
times = 1.5
source = "a test"
)");
  EXPECT_EQ(cluster.time_of(named("gemm", "stage 0 forward")).seconds, 2.0);
  EXPECT_EQ(cluster.time_of(named("gemm", "stage 1 backward")).seconds, 3.0);
  EXPECT_EQ(cluster.time_of(named("swiglu_forward", "stage 0 forward")).seconds, 2.0);
  EXPECT_EQ(cluster.time_of(named("rope", "stage 0 forward")).seconds, 1.0);
}

TEST_F(OtherEngineFile, RatesAreOfSomeGpus) {
  const std::string rule = "[[operator]]\nnames = [\"gemm\"]\nmicroseconds = 5\nsource = \"a test\"\ngpus = [\"{}\"]\n";
  EXPECT_DOUBLE_EQ(cluster_with(fmt::format(fmt::runtime(rule), "GPU")).time_of(named("gemm", "")).seconds, 5e-6);
  Cluster other;
  const std::string log = log_of([&] { other = cluster_with(fmt::format(fmt::runtime(rule), "other")); });
  EXPECT_EQ(other.time_of(named("gemm", "")).seconds, 1.0);
  EXPECT_NE(log.find("rates of operators on other, and none on GPU"), std::string::npos) << log;
}

// A copy of 8 rows of 16 numbers with 4 bytes each: 512 bytes at 1e3 bytes per second, at half its rate.
TEST_F(OtherEngineFile, RowsMoveMoreBytes) {
  Cluster cluster = cluster_with("row_bytes_forward = 4\nrow_rate = 0.5\n");
  cluster.rules.insert(cluster.rules.begin(), {.operators = {"copy"}, .type = {}, .bytes_per_second = 1e3});
  EXPECT_NEAR(cluster.time_of(named("grouped_linear_forward", "")).seconds, 1.0 + 0.512 / 0.5, 1e-12);
  EXPECT_EQ(cluster.time_of(named("grouped_linear_dgrad", "")).seconds, 1.0);
  RecordedOperator last = named("grouped_linear_forward", "");  // its rows have the experts' dim
  std::swap(last.operands.front(), last.operands.back());
  EXPECT_EQ(cluster.time_of(last).seconds, 1.0);
}

// Where the experts are as wide as the model, both of their products have rows of that width.
TEST_F(OtherEngineFile, OnlyOneOfTheExpertsProductsMovesMoreBytes) {
  Cluster cluster = cluster_with("row_bytes_forward = 4\n", kDim);
  cluster.rules.insert(cluster.rules.begin(), {.operators = {"copy"}, .type = {}, .bytes_per_second = 1e3});
  const auto product = [](std::int64_t out) {
    return RecordedOperator{
        .name = "grouped_linear_forward",
        .operands = {{{8, kDim}, DType::kBFloat16}, {{2, out, kDim}, DType::kBFloat16}, {{8, out}, DType::kBFloat16}},
        .pass = {}};
  };
  EXPECT_NEAR(cluster.time_of(product(2 * kDim)).seconds, 1.0 + 0.512, 1e-12);
  EXPECT_EQ(cluster.time_of(product(kDim)).seconds, 1.0);
}

// 3 experts with 8 x 16 numbers each are added to: 3840 bytes at 1e3 bytes per second.
TEST_F(OtherEngineFile, GradientsAreAddedByAnOperator) {
  Cluster cluster = cluster_with("expert_gradient_bytes = 10\n");
  cluster.rules.insert(cluster.rules.begin(), {.operators = {"copy"}, .type = {}, .bytes_per_second = 1e3});
  RecordedOperator wgrad{.name = "grouped_linear_wgrad",
                         .operands = {{{32, 8}, DType::kBFloat16, 0.5, true},
                                      {{32, kDim}, DType::kBFloat16, 0.5, true},
                                      {{3, 8, kDim}, DType::kFloat32}},
                         .pass = "stage 0 backward"};
  EXPECT_EQ(cluster.time_of(wgrad).seconds, 1.0);  // the first micro-batch's
  wgrad.accumulates = true;
  EXPECT_NEAR(cluster.time_of(wgrad).seconds, 1.0 + 3.84, 1e-12);
}

// Three operators of 10 ms wait for a host that needs 20 ms for each, in every micro-batch.
TEST(OtherEngine, APassWaitsForTheHost) {
  StepRecord record;
  record.set_pass("stage 0 forward");
  for (int i = 0; i < 3; ++i) {
    record.begin("rope");
    record.end(false);
  }
  StepTimes times{.of_operator = [](const RecordedOperator&) { return OperatorTime{.seconds = 0.010}; },
                  .of_transfer = {}};
  EXPECT_NEAR(forecast_rank(record, 2, false, times).seconds_of("forward"), 0.060, 1e-12);
  times.least_per_operator = 0.020;
  const RankForecast waits = forecast_rank(record, 2, false, times);
  EXPECT_NEAR(waits.seconds_of("forward"), 0.120, 1e-12);
  EXPECT_NEAR(waits.stages.at(0).forward, 0.060, 1e-12);
  EXPECT_EQ(waits.lines.back().name, "waiting for the host");
}

TEST_F(OtherEngineFile, BadFilesAreToldOf) {
  const auto refused = [&](const std::string& text, const std::vector<std::string>& parts) {
    std::vector<std::string> all = parts;
    all.push_back(path_.string());
    expect_error([&] { cluster_with(text); }, all);
  };
  refused("colour = 1\n", {"$.colour", "no such key"});
  refused("row_rate = \"fast\"\n", {"$.row_rate", "number"});
  refused("[[factor]]\nnames = [\"gemm\"]\ntimes = 2\n", {"$.factor[0].source"});
  refused("[[factor]]\nnames = [\"gemm\"]\ntimes = 0\nsource = \"a test\"\n", {"$.factor[0].times"});
  refused("[[operator]]\nnames = [\"gemm\"]\nsource = \"a test\"\n", {"$.operator[0].gpus"});
  refused("[[factor]]\nnames = [\"gemm\"]\ntimes = 2\npass = \"ward\"\nsource = \"a test\"\n",
          {"$.factor[0].pass", "'ward'", "forward, backward"});
}

// Every file that is shipped can be read, and says that nobody ran it.
TEST(OtherEngines, AreRead) {
  std::size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(ENGINES)) {
    SCOPED_TRACE(entry.path());
    Cluster cluster;
    use_engine(entry.path(), model_with(2), cluster);
    EXPECT_NE(cluster.engine.source.find("not run"), std::string::npos);
    ++count;
  }
  EXPECT_GE(count, 4u);
}

}  // namespace
}  // namespace tessera
