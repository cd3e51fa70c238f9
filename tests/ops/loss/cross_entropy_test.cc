#include "ops/loss/cross_entropy.h"

#include "ops/quantize/quantize.h"
#include "tests/ops/harness.h"
#include "tests/ops/quantize/quantize_inputs.h"

namespace tessera {
namespace {

double reference(const Doubles& logits, std::size_t vocab, std::size_t row, std::int32_t label) {
  if (label == kIgnoredLabel) return 0.0;
  double max = -HUGE_VAL, sum = 0.0;
  for (std::size_t v = 0; v < vocab; ++v) max = std::max(max, logits[row * vocab + v]);
  for (std::size_t v = 0; v < vocab; ++v) sum += std::exp(logits[row * vocab + v] - max);
  return std::log(sum) + max - logits[row * vocab + static_cast<std::size_t>(label)];
}

class CrossEntropy : public OperatorTest {
 protected:
  /// Computes the cross-entropy on a rank that has the whole vocabulary.
  void whole_cross_entropy(const Tensor& logits, const Tensor& labels, float scale, const Tensor& losses,
                           const GemmOperand& d_logits) {
    const Tensor sums = random({logits.dim(0), 3});
    cross_entropy_sums(context(), logits, labels, 0, sums);
    cross_entropy(context(), sums.reshape({1, logits.dim(0), 3}), logits, labels, 0, scale, losses, d_logits);
  }

  /// Every third token does not count.
  Tensor labels_of(std::int64_t rows, std::int64_t vocab) {
    std::vector<std::int32_t> labels;
    for (std::int64_t t = 0; t < rows; ++t) {
      labels.push_back(t % 3 == 2 ? kIgnoredLabel : static_cast<std::int32_t>(t * 7 % vocab));
    }
    return ints(labels);
  }
};

TEST_F(CrossEntropy, LossesAndGradients) {
  constexpr float kScale = 0.25f;
  // The sizes give a vector's tail, exact vectors, and more rows than a task has.
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
    whole_cross_entropy(no_gradient, label_tensor, kScale, losses, {});
    EXPECT_LE(relative_error(losses, expected_losses), kForwardBound);
    whole_cross_entropy(copy, label_tensor, kScale, losses, d_bf16);
    EXPECT_LE(relative_error(d_bf16, expected), kBf16Bound);
    whole_cross_entropy(d_logits, label_tensor, kScale, losses, d_logits);  // in place
    EXPECT_LE(relative_error(losses, expected_losses), kForwardBound);
    EXPECT_LE(relative_error(d_logits, expected), kBackwardBound);
  }
}

// The reference takes the rounded logits: what is computed from them is not rounded once more.
TEST_F(CrossEntropy, BFloat16Logits) {
  constexpr float kScale = 0.25f;
  for (const auto& [rows, vocab] : {std::pair{1, 1}, {9, 32}, {20, 61}}) {
    const Tensor logits = random({rows, vocab}, DType::kBFloat16, 5.0), labels = labels_of(rows, vocab);
    const Tensor losses = random({rows}), in_float = random({rows, vocab});
    const Doubles x = doubles(logits);
    const auto loss = [&, vocab = vocab](const Doubles& v, std::int64_t t) {
      const auto row = static_cast<std::size_t>(t);
      return reference(v, static_cast<std::size_t>(vocab), row, labels.data<std::int32_t>()[row]);
    };
    const Doubles expected = central_differences(
        [&, rows = rows](const Doubles& v) {
          double sum = 0.0;
          for (std::int64_t t = 0; t < rows; ++t) sum += static_cast<double>(kScale) * loss(v, t);
          return sum;
        },
        x);
    Doubles expected_losses;
    for (std::int64_t t = 0; t < rows; ++t) expected_losses.push_back(loss(x, t));
    whole_cross_entropy(logits, labels, kScale, losses, in_float);
    EXPECT_EQ(doubles(logits), x);
    EXPECT_LE(relative_error(losses, expected_losses), kForwardBound);
    EXPECT_LE(relative_error(in_float, expected), kBackwardBound);
    whole_cross_entropy(logits, labels, kScale, losses, logits);  // in place
    EXPECT_LE(relative_error(losses, expected_losses), kForwardBound);
    EXPECT_LE(relative_error(logits, expected), kBf16Bound);
  }
}

// The quantized gradients are those that quantizing the plain gradient gives. They are written alone, or together with
// the plain gradient, which then replaces the logits.
TEST_F(CrossEntropy, QuantizedGradients) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const mx::Format& format : all_formats()) {
      for (const auto& [rows, vocab] : {std::pair{9, 32}, {150, 77}, {64, 256}}) {
        const std::string what = fmt::format("{} {} x {} {}", name_of(dtype), rows, vocab, describe(format));
        const Shape shape{rows, vocab};
        const Tensor logits = random(shape, dtype, 5.0), labels = labels_of(rows, vocab), losses = random({rows});
        const auto copy_of = [&](const Tensor& x) {
          const Tensor copy = random(x.shape(), x.dtype());
          std::memcpy(copy.raw(), x.raw(), x.num_bytes());
          return copy;
        };
        const auto quantized = [&](const Shape& of) {
          return mx::allocate_quantized(of, format,
                                        [&](const Shape& s, DType type) { return arena_.allocate(s, type); });
        };
        const Tensor plain = random(shape, dtype);
        whole_cross_entropy(copy_of(logits), labels, 0.25f, losses, plain);
        const mx::Quantized expected_rows = quantized(shape), expected_columns = quantized(mx::transposed(shape));
        quantize(context(), plain, expected_rows, expected_columns);
        for (const bool in_place : {false, true}) {
          GemmOperand gradient;
          const Tensor from = copy_of(logits), losses_here = random({rows});
          gradient.rows = quantized(shape), gradient.columns = quantized(mx::transposed(shape));
          if (in_place) gradient.plain = from;
          whole_cross_entropy(from, labels, 0.25f, losses_here, gradient);
          EXPECT_EQ(doubles(losses_here), doubles(losses)) << what;
          if (in_place) {
            EXPECT_EQ(doubles(from), doubles(plain)) << what;
          }
          EXPECT_EQ(doubles(gradient.rows.elements), doubles(expected_rows.elements)) << what;
          EXPECT_EQ(doubles(gradient.rows.scales), doubles(expected_rows.scales)) << what;
          EXPECT_EQ(doubles(gradient.columns.elements), doubles(expected_columns.elements)) << what;
          EXPECT_EQ(doubles(gradient.columns.scales), doubles(expected_columns.scales)) << what;
        }
      }
    }
  }
}

TEST_F(CrossEntropy, HugeLogitsDoNotOverflow) {
  const Tensor logits = random({1, 3}), losses = random({1});
  const float values[] = {3e4f, -3e4f, 2.9e4f};
  std::copy_n(values, 3, logits.data<float>());
  whole_cross_entropy(logits, ints({1}), 1.0f, losses, logits);
  EXPECT_NEAR(losses.data<float>()[0], 6e4, 1.0);
  EXPECT_NEAR(logits.data<float>()[0], 1.0, 1e-6);
  EXPECT_NEAR(logits.data<float>()[1], -1.0, 1e-6);
}

// The largest logit is in any lane and in the tail. If it were not the offset, exp would overflow.
TEST_F(CrossEntropy, TheLargestLogitMayBeAnywhere) {
  constexpr std::int64_t kVocab = 37;
  for (std::int64_t at = 0; at < kVocab; ++at) {
    const Tensor logits = random({1, kVocab}), losses = random({1});
    logits.data<float>()[at] = 1000.0f;
    const double expected = reference(doubles(logits), kVocab, 0, 5);
    whole_cross_entropy(logits, ints({5}), 1.0f, losses, logits);
    EXPECT_NEAR(losses.data<float>()[0], expected, kForwardBound * 1000.0) << at;
    EXPECT_NEAR(logits.data<float>()[at], at == 5 ? 0.0 : 1.0, kForwardBound) << at;
  }
}

// A loss that is not finite is seen as such, and stays in its row.
TEST_F(CrossEntropy, NansStayInTheirRow) {
  for (const std::int64_t bad : {0, 16, 20}) {  // in the first vector, in the second, and in the tail
    const Tensor logits = random({2, 21}), losses = random({2});
    logits.data<float>()[bad] = std::nanf("");
    whole_cross_entropy(logits, ints({3, 3}), 1.0f, losses, logits);
    EXPECT_TRUE(std::isnan(losses.data<float>()[0])) << bad;
    EXPECT_TRUE(std::isfinite(losses.data<float>()[1])) << bad;
    for (const double d : doubles(logits.rows(1, 2))) EXPECT_TRUE(std::isfinite(d));
  }
}

TEST_F(CrossEntropy, NothingButIgnoredLabels) {
  const Tensor logits = random({9, 5}), losses = random({9}), d_logits = random({9, 5}, DType::kBFloat16);
  whole_cross_entropy(logits, ints(std::vector<std::int32_t>(9, kIgnoredLabel)), 1.0f, losses, d_logits);
  EXPECT_EQ(doubles(losses), Doubles(9, 0.0));
  EXPECT_EQ(doubles(d_logits), Doubles(45, 0.0));
}

TEST_F(CrossEntropy, LabelsBeyondTheVocabularyThrow) {
  EXPECT_THROW(whole_cross_entropy(random({1, 3}), ints({3}), 1.0f, random({1}), {}), InternalError);
  EXPECT_THROW(whole_cross_entropy(random({1, 3}), ints({-1}), 1.0f, random({1}), {}), InternalError);
}

// Each rank has a part of the vocabulary. All ranks get the losses of the whole, and the gradients of their own logits.
TEST_F(CrossEntropy, AVocabularyCutAmongRanks) {
  constexpr std::int64_t kRanks = 3, kVocab = 7, kRows = 20;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const Tensor logits = random({kRows, kRanks * kVocab}, dtype, 5.0), d_logits = random(logits.shape());
    std::vector<std::int32_t> ids;
    for (std::int64_t t = 0; t < kRows; ++t) {
      ids.push_back(t % 6 == 2 ? kIgnoredLabel : static_cast<std::int32_t>(t * 5 % (kRanks * kVocab)));
    }
    const Tensor labels = ints(ids), losses = random({kRows}), sums = random({kRanks, kRows, 3});
    std::vector<Tensor> parts, d_parts;
    for (std::int64_t rank = 0; rank < kRanks; ++rank) {
      parts.push_back(random({kRows, kVocab}, dtype));
      d_parts.push_back(random({kRows, kVocab}));
      for (std::int64_t t = 0; t < kRows; ++t) {
        const Tensor from = logits.columns(rank * kVocab, (rank + 1) * kVocab).rows(t, t + 1);
        std::memcpy(parts.back()[t].raw(), from.raw(), kVocab * size_of(dtype));
      }
      cross_entropy_sums(context(), parts.back(), labels, rank * kVocab, sums[rank]);
    }
    whole_cross_entropy(logits, labels, 0.5f, losses, d_logits);
    for (std::int64_t rank = 0; rank < kRanks; ++rank) {
      const Tensor losses_of_rank = random({kRows});
      const auto at = static_cast<std::size_t>(rank);
      cross_entropy(context(), sums, parts[at], labels, rank * kVocab, 0.5f, losses_of_rank, d_parts[at]);
      EXPECT_LE(relative_error(losses_of_rank, doubles(losses)), kForwardBound);
      Doubles expected;
      for (std::int64_t t = 0; t < kRows; ++t) {
        const float* row = d_logits[t].data<float>() + rank * kVocab;
        expected.insert(expected.end(), row, row + kVocab);
      }
      EXPECT_LE(relative_error(d_parts[at], expected), kBackwardBound);
    }
  }
}

TEST_F(CrossEntropy, SameAtAnyNumberOfThreads) {
  const Tensor logits = random({50, 77}), losses = random({50}), d_logits = random({50, 77}), copy = random({50, 77});
  expect_same_for_any_threads(
      [&] {
        std::copy_n(logits.data<float>(), logits.num_elements(), copy.data<float>());
        whole_cross_entropy(copy, ints(std::vector<std::int32_t>(50, 5)), 1.0f, losses, d_logits);
      },
      {losses, d_logits});
}

}  // namespace
}  // namespace tessera
