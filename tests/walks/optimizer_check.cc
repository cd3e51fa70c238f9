// Checks what tests/walks/optimizer.patch adds: the operator against its formula in float64, and a run that it trains.
#include <gtest/gtest.h>

#include "ops/optimizer/lion.h"
#include "step/optimizer.h"
#include "step/training_step.h"
#include "tests/expect_error.h"
#include "tests/ops/harness.h"
#include "tests/step/small_model.h"
#include "tests/walks/config_page.h"

namespace tessera {
namespace {

constexpr LionOptions kOptions{.beta1 = 0.9f, .beta2 = 0.99f, .weight_decay = 0.1f};
constexpr double kRate = 0.01, kGradientScale = 0.5;  // learning rate, and the factor of gradients
constexpr double kTie = 1e-6;  // the sign of a blend that is this small may differ between float32 and float64

double sign_of(double x) { return x > 0 ? 1.0 : x < 0 ? -1.0 : 0.0; }

struct Formula {
  double beta1, beta2, decay, rate;

  double blend(double m, double g) const { return beta1 * m + (1 - beta1) * g; }
  double weight(double w, double m, double g) const { return w * (1 - rate * decay) - rate * sign_of(blend(m, g)); }
  double moment(double m, double g) const { return beta2 * m + (1 - beta2) * g; }
};

class Lion : public OperatorTest {
 protected:
  Tensor step_S(float finite) {
    const AdamWStep step{.learning_rate = static_cast<float>(kRate),
                         .correction1 = 3.0f,
                         .correction2 = 5.0f,
                         .gradient_scale = static_cast<float>(kGradientScale),
                         .finite = finite};
    const Tensor tensor = arena_.allocate({AdamWStep::kNumbers}, DType::kFloat32);
    std::memcpy(tensor.raw(), &step, sizeof step);
    return tensor;
  }

  void expect_formula(DType moments, double bound) {
    constexpr std::int64_t kSize = 70'000;  // more numbers than two tasks have
    const Formula formula{.beta1 = 0.9, .beta2 = 0.99, .decay = 0.1, .rate = kRate};
    const Tensor w = random({kSize}), m = random({kSize}, moments);
    for (int step = 1; step <= 3; ++step) {
      const Tensor d_w = random({kSize});
      d_w.data<float>()[step] = 0.0f;
      if (step == 1 && moments == DType::kFloat32) m.data<float>()[step] = 0.0f;
      const Doubles g = doubles(d_w), m_before = doubles(m), w_before = doubles(w);
      lion(context(), kOptions, step_S(1.0f), d_w, m, w);
      const Doubles w_after = doubles(w), m_after = doubles(m);
      for (std::size_t i = 0; i < g.size(); ++i) {
        const double scaled = g[i] * kGradientScale, m_i = m_before[i];
        const double blend = formula.blend(m_i, scaled);
        ASSERT_NEAR(m_after[i], formula.moment(m_i, scaled), bound) << i;
        if (blend != 0.0 && std::abs(blend) < kTie) continue;
        ASSERT_NEAR(w_after[i], formula.weight(w_before[i], m_i, scaled), 1e-6) << i;
      }
    }
  }
};

TEST_F(Lion, StepsAgainstTheFormula) { expect_formula(DType::kFloat32, 1e-6); }
TEST_F(Lion, MomentInBfloat16) { expect_formula(DType::kBFloat16, 0x1.01p-8); }

TEST_F(Lion, LeavesAStepOut) {
  const Tensor w = random({100}), m = random({100});
  const Doubles w_before = doubles(w), m_before = doubles(m);
  lion(context(), kOptions, step_S(0.0f), random({100}), m, w);
  EXPECT_EQ(doubles(w), w_before);
  EXPECT_EQ(doubles(m), m_before);
}

JobConfig lion_config() {
  JobConfig config = parse_job_config(
      kSmallModel, {"--optimizer.name=Lion", "--optimizer.lr=0.002", "--optimizer.beta2=0.99", "--training.steps=20",
                    "--training.seq_len=32", "--training.local_batch_size=2", "--training.max_norm=0.5",
                    "--training.mixed_precision_param=float32", "--training.num_threads=1"});
  config.validate();
  return config;
}

/// A run's first step is the formula's, of clipped gradients. Twenty steps on one batch learn it.
TEST(LionRun, Trains) {
  const JobConfig config = lion_config();
  TrainingStep step(config);
  step.allocate();
  Parameters& parameters = step.model().parameters();
  ASSERT_EQ(parameters.optimizer_tensors().size(), 1u);
  EXPECT_EQ(parameters.optimizer_tensors()[0].suffix, ".exp_avg");
  EXPECT_EQ(step.memory_plan().optimizer_state, step.memory_plan().gradients);

  std::vector<std::int32_t> tokens(2 * 33);
  for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<std::int32_t>((i * 7) % 90 + 2);
  std::vector<Batch> batches;
  batches.push_back(step.make_batch());
  batches.back().fill(tokens);

  const Doubles before = doubles(parameters.all_masters());
  const StepResult first = step.run(1, batches);
  const Formula formula{.beta1 = 0.9, .beta2 = 0.99, .decay = 0.1, .rate = first.learning_rate};
  ASSERT_GT(first.grad_norm, 0.5);
  const double scale = 0.5 / first.grad_norm;
  const Doubles g = doubles(parameters.all_gradients()), w = doubles(parameters.all_masters());
  const Doubles m = doubles(parameters.optimizer_tensor(0));
  for (std::size_t i = 0; i < g.size(); ++i) {
    ASSERT_NEAR(w[i], formula.weight(before[i], 0.0, g[i] * scale), 1e-6) << i;
    ASSERT_NEAR(m[i], formula.moment(0.0, g[i] * scale), 1e-6) << i;
  }
  double loss = first.loss;
  for (std::int64_t i = 2; i <= 20; ++i) loss = step.run(i, batches).loss;
  EXPECT_LT(loss, 0.7 * first.loss);
}

TEST(LionRun, RefusesAGpuAndOtherNames) {
  const JobConfig config = lion_config();
  expect_error([&] { Optimizer(config).allocate(Device::kCuda); }, {"Lion", "GPU", "training.device"});
  JobConfig other = config;
  other.optimizer.name = "Tiger";
  expect_error([&] { other.validate(); }, {"Tiger", "Lion"});
}

TEST(LionRun, HasItsRowsOnTheConfigurationsPage) {
  JobConfig config;
  expect_section_of_config_page(config_table(config), "optimizer.");
}

}  // namespace
}  // namespace tessera
