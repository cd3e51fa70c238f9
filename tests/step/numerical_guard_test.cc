// Tests steps that fail, are made once more, and then go on or end the run.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <fstream>
#include <nlohmann/json.hpp>

#include "run/trainer.h"
#include "tests/comm/ranks.h"
#include "tests/data/support.h"
#include "tests/log_of.h"
#include "tests/run/run_config.h"
#include "tests/step/short_run.h"

namespace tessera {
namespace {

using comm_test::on_ranks;
using data::TemporaryFolder;
using Losses = std::map<std::int64_t, std::pair<double, double>>;  // losses and gradient norms, by step

class NumericalGuard : public ::testing::Test {
 protected:
  NumericalGuard() { data::make_dataset(scratch_, 400, 3000, 0.1); }

  JobConfig config(const std::vector<std::string>& overrides) const {
    static const std::string kToml = std::string(kShortRun) + R"(
[metrics]
log_freq = 1
)";
    std::vector<std::string> all = {"--job.overwrite"};
    all.insert(all.end(), overrides.begin(), overrides.end());
    return run_config(scratch_, kToml, all);
  }

  Losses train(int num_ranks, const std::vector<std::string>& overrides = {},
               const std::function<void(std::int64_t, Trainer&)>& at_step = {}) const {
    const JobConfig job = config(overrides);
    Losses losses;
    on_ranks(num_ranks, [&](Ranks& ranks) {
      const volatile std::sig_atomic_t no_signal = 0;
      Trainer trainer(job, &ranks);
      trainer.set_step_callback([&](std::int64_t step, const StepResult& result) {
        if (ranks.rank() == 0) losses[step] = {result.total_loss, result.grad_norm};
        if (at_step) at_step(step, trainer);
      });
      trainer.run(no_signal);
    });
    return losses;
  }

  nlohmann::json metrics_of(std::int64_t step) const {
    std::ifstream file(scratch_ / "outputs" / "metrics.jsonl");
    for (std::string line; std::getline(file, line);) {
      nlohmann::json json = nlohmann::json::parse(line);
      if (json["step"] == step) return json;
    }
    ADD_FAILURE() << "no line of step " << step;
    return {};
  }

  TemporaryFolder scratch_;
};

using Overrides = std::vector<std::string>;

const std::pair<int, Overrides> kMeshes[] = {
    {1, {}},
    {4, {}},
    {4, {"--parallelism.data_parallel_replicate_degree=2", "--debug.nan_on_rank=3"}},
    {2, {"--parallelism.pipeline_parallel_degree=2", "--debug.nan_on_rank=0"}},
    {2, {"--parallelism.pipeline_parallel_degree=2", "--debug.nan_on_rank=1"}},
    {2, {"--parallelism.tensor_parallel_degree=2"}},
};

TEST_F(NumericalGuard, ATransientFaultChangesNoBit) {
  for (const auto& [num_ranks, mesh] : kMeshes) {
    SCOPED_TRACE(fmt::format("{} ranks {}", num_ranks, mesh.empty() ? "" : mesh.back()));
    const Losses straight = train(num_ranks, mesh);
    Overrides nan = mesh;
    nan.emplace_back("--debug.nan_at_step=5");
    Losses healed;
    const std::string log = log_of([&] { healed = train(num_ranks, nan); });
    EXPECT_EQ(healed, straight);
    EXPECT_THAT(log, testing::ContainsRegex("step 5: loss .*nan.*; made again from the same batches: it is well"));
    EXPECT_THAT(metrics_of(5)["repeated_for"], testing::HasSubstr("nan"));
    EXPECT_FALSE(metrics_of(4).contains("repeated_for"));
  }
}

TEST_F(NumericalGuard, AFaultThatComesBackEndsTheRun) {
  for (const auto& [num_ranks, mesh] : kMeshes) {
    SCOPED_TRACE(fmt::format("{} ranks {}", num_ranks, mesh.empty() ? "" : mesh.back()));
    Overrides nan = mesh;
    nan.insert(nan.end(), {"--debug.nan_at_step=5", "--debug.nan_count=2"});
    try {
      train(num_ranks, nan);
      ADD_FAILURE() << "expected an error";
    } catch (const NonFiniteStep& error) {
      EXPECT_THAT(error.what(), testing::HasSubstr("step 5: "));
      EXPECT_THAT(error.what(), testing::HasSubstr("; made again from the same batches: "));
      EXPECT_EQ(error.result.step, 5);
    }
  }
}

TEST_F(NumericalGuard, AFaultOfOneHostOnly) {
  std::array<char, 256> host{};
  gethostname(host.data(), host.size() - 1);
  const Overrides always = {"--debug.nan_at_step=5", "--debug.nan_count=9", "--debug.nan_on_rank=-1"};
  Overrides here = always, elsewhere = always;
  here.push_back(fmt::format("--debug.nan_on_host={}", host.data()));
  elsewhere.emplace_back("--debug.nan_on_host=another");
  EXPECT_THROW(train(2, here), NonFiniteStep);
  EXPECT_EQ(train(2, elsewhere), train(2));
}

// The loss of a batch is a spike, both times: the weights before one step make its logits large.
class LossSpikes : public NumericalGuard {
 protected:
  /// Makes the output's weights 30 times as large for the step after 24.
  static void make_spike(std::int64_t step, Trainer& trainer) {
    if (step != 24 && step != 25) return;
    Parameters& parameters = trainer.model().parameters();
    for (ParamId id = 0; id < parameters.size(); ++id) {
      if (parameters.spec(id).name != "output.weight") continue;
      const Tensor shard = parameters.master_shard(id);
      const float factor = step == 24 ? 30.0f : 1.0f / 30.0f;
      for (std::int64_t i = 0; i < shard.num_elements(); ++i) shard.data<float>()[i] *= factor;
    }
    Arena no_scratch(0);
    trainer.model().refresh_weights({.arena = &no_scratch});
  }
};

TEST_F(LossSpikes, EndTheRunOrAreLeftOut) {
  for (const int num_ranks : {1, 2}) {
    const Overrides off = {"--training.steps=28"}, on = {"--training.steps=28", "--training.max_loss_spike=1.5"};
    const Losses unguarded = train(num_ranks, off, make_spike);
    ASSERT_GT(unguarded.at(25).first, 2.0 * unguarded.at(24).first) << "no spike";
    EXPECT_FALSE(metrics_of(25).contains("repeated_for"));
    try {
      train(num_ranks, on, make_spike);
      ADD_FAILURE() << "expected an error";
    } catch (const SpikedStep& error) {
      EXPECT_EQ(error.status(), ExitStatus::kLossSpike);
      EXPECT_EQ(error.result.step, 25);
      EXPECT_THAT(error.what(), testing::HasSubstr("step 25: loss "));
      EXPECT_THAT(error.what(), testing::HasSubstr("more than training.max_loss_spike = 1.5 times the mean of the last "
                                                   "20 steps'"));
    }
    Overrides skip = on;
    skip.emplace_back("--training.skip_loss_spikes");
    Losses skipped;
    const std::string log = log_of([&] { skipped = train(num_ranks, skip, make_spike); });
    EXPECT_EQ(skipped.at(25), unguarded.at(25));
    EXPECT_NE(skipped.at(26), unguarded.at(26)) << "the weights are those of before";
    EXPECT_LT(skipped.at(26).first, 1.5 * unguarded.at(24).first);
    EXPECT_EQ(metrics_of(25)["skipped"], true);
    EXPECT_THAT(log, testing::HasSubstr("The step is left out (training.skip_loss_spikes)"));
  }
}

// Neither guard changes a run without faults.
TEST_F(LossSpikes, WithoutASpikeNothingChanges) {
  const Losses off = train(2, {"--training.steps=25"});
  EXPECT_EQ(train(2, {"--training.steps=25", "--training.max_loss_spike=1.5", "--training.skip_loss_spikes"}), off);
}

}  // namespace
}  // namespace tessera
