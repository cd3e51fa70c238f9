// Compares the operators of measured steps with predictions.
#include "plan/measure/step_comparison.h"

#include <gtest/gtest.h>

#include "config/job_config.h"
#include "device/cuda.h"
#include "plan/measure/random_steps.h"
#include "tests/comm/ranks.h"
#include "tests/step/small_model.h"

namespace tessera {
namespace {

RecordedOperator timed_call(const std::string& name, DType type, double seconds) {
  return {.name = name, .operands = {{{8}, type}}, .pass = {}, .seconds = seconds};
}

TEST(StepComparison, GroupsHaveTheSumsOfTheirCalls) {
  const std::vector<RecordedOperator> step = {
      timed_call("rope", DType::kFloat32, 1.0), timed_call("add", DType::kFloat32, 8.0),
      timed_call("rope", DType::kBFloat16, 2.5), timed_call("add", DType::kFloat32, 7.0)};
  const auto groups = compare_operators(step, [](const RecordedOperator&) { return OperatorTime{.seconds = 2.0}; });
  ASSERT_EQ(groups.size(), 3u);
  EXPECT_EQ(groups[0].name, "add float32");
  EXPECT_EQ(groups[0].num_calls, 2u);
  EXPECT_EQ(groups[0].predicted, 4.0);
  EXPECT_EQ(groups[0].measured, 15.0);
  EXPECT_EQ(groups[1].name, "rope float32");
  EXPECT_EQ(groups[2].name, "rope bfloat16");
}

std::vector<std::int64_t> durations(const std::vector<cuda::KernelRun>& runs) {
  std::vector<std::int64_t> result;
  for (const cuda::KernelRun& run : runs) result.push_back(run.end - run.begin);
  return result;
}

// The GPU was busy in the replay, so its durations count. Copies of tokens may run at any time.
TEST(StepComparison, DurationsAreThoseOfTheReplay) {
  std::vector<cuda::KernelRun> runs = {{"tokens", 0, 1},      {"gemm", 10, 30},      {"copy", 15, 17},
                                       {"add", 30, 35},       {"fill", 35, 36},      {"gemm", 36, 66},
                                       {"zero", 70, 72},      {"gemm", 100, 115, 0}, {"add", 120, 124, 1},
                                       {"copy", 125, 126, 2}, {"fill", 130, 132},    {"gemm", 140, 160, 3}};
  ASSERT_TRUE(take_durations_of_replay(runs));
  EXPECT_EQ(durations(runs), (std::vector<std::int64_t>{1, 20, 2, 5, 1, 30, 2, 20, 5, 1, 1, 30}));
  runs[3].name = "rope";
  runs[7].end = 107;
  const std::vector<std::int64_t> before = durations(runs);
  EXPECT_FALSE(take_durations_of_replay(runs));
  EXPECT_EQ(durations(runs), before);
  runs.erase(runs.begin() + 1, runs.begin() + 6);  // no replay
  EXPECT_FALSE(take_durations_of_replay(runs));
}

/// Trains a small model on the device, and checks the times of its operators.
void check_times_on(Device device) {
  const JobConfig config = parse_job_config(kSmallModel, {"--training.local_batch_size=2", "--training.seq_len=64"});
  TrainingStep step(config, nullptr, device);
  step.allocate();
  RandomSteps steps(step, config, Mesh());
  for (int i = 0; i < 3; ++i) steps.run();
  const RandomSteps::Timed timed = steps.time_operators(3);
  double sum = 0.0;
  for (const RecordedOperator& call : timed.operators) {
    EXPECT_GT(call.seconds, 0.0) << call.name;
    sum += call.seconds;
  }
  EXPECT_GT(timed.operators.size(), 100u);
  EXPECT_LT(sum, 1.5 * timed.step_seconds);
  // A step goes on after its operators were timed.
  EXPECT_GT(steps.run().loss, 0.0);
}

TEST(StepComparison, OperatorsAreTimedOnACpu) { check_times_on(Device::kCpu); }

// On CPUs the standard backend receives as many rows as were sent, so the operands of steps differ.
TEST(StepComparison, OperatorsAreTimedOverRanksThatExchangeRows) {
  const JobConfig config = parse_job_config(
      kSmallModel, {"--training.local_batch_size=2", "--training.seq_len=64", "--parallelism.expert_parallel_degree=2",
                    "--parallelism.expert_parallel_comm_backend=standard"});
  comm_test::with_ranks(2, [&](ProcessGroup& world) {
    const auto mesh = std::make_shared<Mesh>(world, resolve(config.mesh_degrees(), 2));
    TrainingStep step(config, mesh, Device::kCpu);
    step.allocate();
    RandomSteps steps(step, config, *mesh);
    EXPECT_GT(steps.time_operators(4).operators.size(), 100u);
  });
}

TEST(StepComparison, OperatorsAreTimedOnAGpu) {
  if (!cuda::available()) GTEST_SKIP() << cuda::why_unavailable();
  check_times_on(Device::kCuda);
}

}  // namespace
}  // namespace tessera
