// Compares the whole model and the whole step with an independent PyTorch implementation in float64 (tests/reference/,
// which wrote the files in tests/golden/).
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "base/error.h"
#include "checkpoint/safetensors.h"
#include "step/training_step.h"
#include "tests/compare.h"
#include "tests/step/forward_backward.h"

namespace tessera {
namespace {

template <typename T>
std::vector<T> numbers(const SafetensorsFile& file, const std::string& name) {
  const SafetensorsEntry& entry = file.at(name);
  std::vector<T> result(entry.bytes.size() / sizeof(T));
  std::memcpy(result.data(), entry.bytes.data(), entry.bytes.size());
  return result;
}

std::span<const float> span_of(const Tensor& tensor) {
  return {tensor.data<float>(), static_cast<std::size_t>(tensor.num_elements())};
}

struct Golden {
  SafetensorsFile file;
  JobConfig config;

  explicit Golden(const std::string& name, const std::vector<std::string>& overrides = {})
      : file(std::string(TESSERA_TEST_DATA) + "/golden/" + name + ".safetensors"),
        config(parse_job_config(file.metadata().at("config"), overrides)) {
    config.validate();
  }

  void load(Parameters& parameters) const {
    for (ParamId id = 0; id < parameters.size(); ++id) {
      file.read("param." + parameters.spec(id).name, parameters.master(id));
    }
    for (ParamId id = 0; id < parameters.num_buffers(); ++id) {
      file.read("buffer." + parameters.buffer_spec(id).name, parameters.buffer(id));
    }
    Arena no_scratch(0);
    parameters.refresh_shadows({.arena = &no_scratch});
  }

  std::size_t num_with_prefix(const std::string& prefix) const {
    std::size_t count = 0;
    for (const auto& [name, entry] : file.entries()) count += name.starts_with(prefix) ? 1 : 0;
    return count;
  }
};

class GoldenModel : public ::testing::TestWithParam<const char*> {};

TEST_P(GoldenModel, LogitsLossAndGradients) {
  const Golden golden(GetParam());
  TrainingStep step(golden.config);
  step.allocate();
  Model& model = step.model();
  Parameters& parameters = model.parameters();
  ASSERT_EQ(golden.num_with_prefix("param."), parameters.size());
  golden.load(parameters);
  Batch batch = step.make_batch();
  batch.fill(numbers<std::int32_t>(golden.file, "tokens"), numbers<std::int32_t>(golden.file, "labels"));

  const std::int64_t vocab = golden.config.model.args.vocab_size;
  const std::int64_t modules = golden.config.model.args.num_mtp_modules;
  std::vector<std::vector<float>> storage;
  std::vector<Tensor> logits;
  for (std::int64_t i = 0; i <= modules; ++i) {
    storage.emplace_back(static_cast<std::size_t>(batch.num_tokens() * vocab));
    logits.emplace_back(storage.back().data(), Shape{batch.num_tokens(), vocab}, DType::kFloat32, Device::kCpu);
  }
  model.evaluate(step.context(), batch, {}, logits[0], std::span(logits).subspan(1));
  EXPECT_LE(relative_difference(storage[0], numbers<float>(golden.file, "logits")), 1e-5);
  for (std::size_t k = 0; k + 1 < storage.size(); ++k) {
    EXPECT_LE(relative_difference(storage[k + 1], numbers<float>(golden.file, fmt::format("mtp_logits.{}", k))), 1e-5)
        << k;
  }

  const LossScale scale{.per_token = 1.0 / static_cast<double>(batch.num_valid()),
                        .per_sequence = 1.0 / static_cast<double>(batch.num_seqs())};
  forward_backward(model, step.context(), batch, scale);
  const LossSums sums = model.sums().losses();
  const std::vector<double> loss = numbers<double>(golden.file, "loss");  // total, main, mtp, balance
  EXPECT_NEAR(sums.main * scale.per_token, loss[1], 1e-5 * loss[1]);
  if (modules > 0) {
    EXPECT_NEAR(sums.mtp * scale.per_token / static_cast<double>(modules), loss[2], 1e-5 * loss[2]);
  }
  double balance = 0.0;
  for (std::size_t i = 0; i < model.num_moe_layers(); ++i) {
    balance += model.sums().balance_loss(i) * scale.per_sequence;
    const auto counts = numbers<std::int32_t>(golden.file, "expert_counts." + model.moe_layer(i).name());
    EXPECT_TRUE(std::ranges::equal(counts, model.sums().counts_E(i))) << model.moe_layer(i).name();
  }
  EXPECT_NEAR(balance, loss[3], 1e-5 * loss[3]);

  for (ParamId id = 0; id < parameters.size(); ++id) {
    const std::string& name = parameters.spec(id).name;
    EXPECT_LE(relative_difference(span_of(parameters.gradient(id)), numbers<float>(golden.file, "grad." + name)), 1e-4)
        << name;
  }
}

/// Returns the gradients of one micro-batch, followed by its losses and loads.
std::vector<float> gradients_of(const std::string& name, const std::vector<std::string>& overrides) {
  const Golden golden(name, overrides);
  TrainingStep step(golden.config);
  step.allocate();
  golden.load(step.model().parameters());
  Batch batch = step.make_batch();
  batch.fill(numbers<std::int32_t>(golden.file, "tokens"), numbers<std::int32_t>(golden.file, "labels"));
  forward_backward(step.model(), step.context(), batch, {.per_token = 0.01, .per_sequence = 0.5});
  const LossSums sums = step.model().sums().losses();
  const std::span<const float> gradients = span_of(step.model().parameters().all_gradients());
  std::vector<float> result(gradients.begin(), gradients.end());
  result.push_back(static_cast<float>(sums.main));
  result.push_back(static_cast<float>(sums.mtp));
  for (std::size_t i = 0; i < step.model().num_moe_layers(); ++i) {
    for (const double count : step.model().sums().counts_E(i)) result.push_back(static_cast<float>(count));
  }
  return result;
}

TEST_P(GoldenModel, RecomputationChangesNoBit) {
  for (const char* dtype : {"float32", "bfloat16"}) {
    const std::string type = fmt::format("--training.mixed_precision_param={}", dtype);
    const std::vector<float> kept = gradients_of(GetParam(), {type, "--activation_checkpoint.mode=none"});
    for (const char* mode : {"selective", "full"}) {
      const auto other = gradients_of(GetParam(), {type, fmt::format("--activation_checkpoint.mode={}", mode)});
      ASSERT_EQ(kept.size(), other.size());
      EXPECT_EQ(std::memcmp(kept.data(), other.data(), kept.size() * sizeof(float)), 0) << dtype << " " << mode;
    }
  }
}

// bfloat16 has 8 significant bits (a relative rounding of 2^-9), and a path through the model has a few dozen
// roundings. The loss averages them out.
TEST_P(GoldenModel, Bfloat16LossIsClose) {
  const Golden golden(GetParam(), {"--training.mixed_precision_param=bfloat16"});
  TrainingStep step(golden.config);
  step.allocate();
  golden.load(step.model().parameters());
  Batch batch = step.make_batch();
  batch.fill(numbers<std::int32_t>(golden.file, "tokens"), numbers<std::int32_t>(golden.file, "labels"));
  const double loss = numbers<double>(golden.file, "loss")[1];
  EXPECT_NEAR(step.evaluate(batch), loss, 0.01 * loss);
}

INSTANTIATE_TEST_SUITE_P(Cases, GoldenModel,
                         ::testing::Values("dense", "q_lora_yarn", "block_causal", "moe_softmax", "moe_sigmoid_groups",
                                           "moe_softmax_groups", "force_balance", "balance_loss", "mtp", "odd_sizes"),
                         [](const auto& parameter) { return std::string(parameter.param); });

// A step reports the mean over its modules.
TEST(GoldenSteps, TheLossOfTwoPredictionModules) {
  const Golden golden("mtp");
  TrainingStep step(golden.config);
  step.allocate();
  golden.load(step.model().parameters());
  ASSERT_EQ(golden.config.model.args.num_mtp_modules, 2);
  Batch batch = step.make_batch();
  batch.fill(numbers<std::int32_t>(golden.file, "tokens"), numbers<std::int32_t>(golden.file, "labels"));
  const StepResult result = step.run(1, std::span(&batch, 1));
  const std::vector<double> loss = numbers<double>(golden.file, "loss");
  EXPECT_NEAR(result.loss, loss[1], 1e-5 * loss[1]);
  EXPECT_NEAR(result.mtp_loss, loss[2], 1e-5 * loss[2]);
  EXPECT_EQ(result.num_tokens, batch.num_tokens());
}

// Ten optimizer steps cover accumulation, clipping, warm-up and decay, AdamW, and the expert bias.
TEST(GoldenSteps, LossesAndWeightsAfterTenSteps) {
  const Golden golden("train_steps");
  TrainingStep step(golden.config);
  step.allocate();
  Parameters& parameters = step.model().parameters();
  golden.load(parameters);
  const auto tokens = numbers<std::int32_t>(golden.file, "tokens");
  const auto labels = numbers<std::int32_t>(golden.file, "labels");
  const auto losses = numbers<double>(golden.file, "losses");
  const auto norms = numbers<double>(golden.file, "grad_norms");
  const auto rates = numbers<double>(golden.file, "lrs");
  const auto micro_batches = static_cast<std::size_t>(golden.config.micro_batches_per_step());
  ASSERT_EQ(micro_batches, 2u);
  std::vector<Batch> batches;
  while (batches.size() < micro_batches) batches.push_back(step.make_batch());
  const std::size_t batch_tokens = tokens.size() / 10 / micro_batches,
                    batch_labels = labels.size() / 10 / micro_batches;
  for (std::size_t s = 0; s < 10; ++s) {
    for (std::size_t b = 0; b < micro_batches; ++b) {
      const std::size_t at = s * micro_batches + b;
      batches[b].fill(std::span(tokens).subspan(at * batch_tokens, batch_tokens),
                      std::span(labels).subspan(at * batch_labels, batch_labels));
    }
    const StepResult result = step.run(static_cast<std::int64_t>(s) + 1, batches);
    EXPECT_NEAR(result.total_loss, losses[s * 4], 1e-4 * losses[s * 4]) << s;
    EXPECT_NEAR(result.loss, losses[s * 4 + 1], 1e-4 * losses[s * 4 + 1]) << s;
    EXPECT_NEAR(result.mtp_loss, losses[s * 4 + 2], 1e-4 * losses[s * 4 + 2]) << s;
    EXPECT_NEAR(result.balance_loss, losses[s * 4 + 3], 1e-4 * losses[s * 4 + 3]) << s;
    EXPECT_NEAR(result.grad_norm, norms[s], 1e-4 * norms[s]) << s;
    EXPECT_NEAR(result.learning_rate, rates[s], 1e-6 * rates[s]) << s;
  }
  // Adam divides by the root of the second moment, which makes the rounding of tiny gradients visible. So the bound is
  // not 1e-5.
  for (ParamId id = 0; id < parameters.size(); ++id) {
    const std::string& name = parameters.spec(id).name;
    EXPECT_LE(relative_difference(span_of(parameters.master(id)), numbers<float>(golden.file, "param_after." + name)),
              1e-3)
        << name;
  }
  for (ParamId id = 0; id < parameters.num_buffers(); ++id) {
    const std::string& name = parameters.buffer_spec(id).name;
    EXPECT_LE(relative_difference(span_of(parameters.buffer(id)), numbers<float>(golden.file, "buffer_after." + name)),
              1e-5)
        << name;
  }
}

}  // namespace
}  // namespace tessera
