#include "ops/cross_entropy.h"

#include "tests/ops/harness.h"

namespace tessera {
namespace {

double reference(const Doubles& logits, std::size_t vocab, std::size_t row, std::int32_t label) {
  if (label == kIgnoredLabel) return 0.0;
  double max = -HUGE_VAL, sum = 0.0;
  for (std::size_t v = 0; v < vocab; ++v) max = std::max(max, logits[row * vocab + v]);
  for (std::size_t v = 0; v < vocab; ++v) sum += std::exp(logits[row * vocab + v] - max);
  return std::log(sum) + max - logits[row * vocab + static_cast<std::size_t>(label)];
}

class CrossEntropy : public OperatorTest {};

TEST_F(CrossEntropy, LossesAndGradients) {
  constexpr float kScale = 0.25f;
  // A vector's tail, exact vectors, more rows than a task.
  for (const auto& [rows, vocab] : {std::pair{1, 1}, {3, 5}, {9, 32}, {20, 61}}) {
    const Tensor logits = random({rows, vocab}, DType::kFloat32, 5.0);
    const Doubles x = doubles(logits);
    std::vector<std::int32_t> labels;
    for (std::int32_t t = 0; t < rows; ++t) labels.push_back(t % 4 == 2 ? kIgnoredLabel : t * 7 % vocab);
    const Tensor label_tensor = ints(labels), losses = random({rows}), d_logits = random({rows, vocab});
    const Tensor d_bf16 = random({rows, vocab}, DType::kBFloat16), copy = random({rows, vocab}),
                 no_gradient = random({rows, vocab});
    for (const Tensor& target : {copy, no_gradient, d_logits}) {
      std::copy_n(logits.data<float>(), logits.num_elements(), target.data<float>());
    }
    Doubles expected_losses;
    for (std::size_t t = 0; t < labels.size(); ++t) {
      expected_losses.push_back(reference(x, static_cast<std::size_t>(vocab), t, labels[t]));
    }
    const Doubles expected = central_differences(
        [&](const Doubles& v) {
          double sum = 0.0;
          for (std::size_t t = 0; t < labels.size(); ++t) {
            sum += static_cast<double>(kScale) * reference(v, static_cast<std::size_t>(vocab), t, labels[t]);
          }
          return sum;
        },
        x);
    cross_entropy(context(), no_gradient, label_tensor, kScale, losses, {});
    EXPECT_LE(relative_error(losses, expected_losses), kForwardBound);
    cross_entropy(context(), copy, label_tensor, kScale, losses, d_bf16);
    EXPECT_LE(relative_error(d_bf16, expected), kBf16Bound);
    cross_entropy(context(), d_logits, label_tensor, kScale, losses, d_logits);  // in place
    EXPECT_LE(relative_error(losses, expected_losses), kForwardBound);
    EXPECT_LE(relative_error(d_logits, expected), kBackwardBound);
  }
}

TEST_F(CrossEntropy, HugeLogitsDoNotOverflow) {
  const Tensor logits = random({1, 3}), losses = random({1});
  const float values[] = {3e4f, -3e4f, 2.9e4f};
  std::copy_n(values, 3, logits.data<float>());
  cross_entropy(context(), logits, ints({1}), 1.0f, losses, logits);
  EXPECT_NEAR(losses.data<float>()[0], 6e4, 1.0);
  EXPECT_NEAR(logits.data<float>()[0], 1.0, 1e-6);
  EXPECT_NEAR(logits.data<float>()[1], -1.0, 1e-6);
}

TEST_F(CrossEntropy, LabelsBeyondTheVocabularyThrow) {
  EXPECT_THROW(cross_entropy(context(), random({1, 3}), ints({3}), 1.0f, random({1}), {}), InternalError);
}

TEST_F(CrossEntropy, SameAtAnyNumberOfThreads) {
  const Tensor logits = random({50, 77}), losses = random({50}), d_logits = random({50, 77}), copy = random({50, 77});
  expect_same_for_any_threads(
      [&] {
        std::copy_n(logits.data<float>(), logits.num_elements(), copy.data<float>());
        cross_entropy(context(), copy, ints(std::vector<std::int32_t>(50, 5)), 1.0f, losses, d_logits);
      },
      {losses, d_logits});
}

}  // namespace
}  // namespace tessera
