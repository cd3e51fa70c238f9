#include "ops/elementwise/swiglu.h"

#include "ops/elementwise/elementwise.h"
#include "tests/ops/harness.h"

namespace tessera {
namespace {

Doubles reference(const Doubles& h, std::size_t width) {
  Doubles a;
  for (std::size_t row = 0; row < h.size() / (2 * width); ++row) {
    for (std::size_t j = 0; j < width; ++j) {
      const double gate = h[row * 2 * width + j], up = h[row * 2 * width + width + j];
      a.push_back(gate / (1.0 + std::exp(-gate)) * up);
    }
  }
  return a;
}

class SwiGlu : public TypedOperatorTest {};

TEST_P(SwiGlu, ForwardAndBackward) {
  // The sizes give a vector's tail, and a full block of the backward's sums with a tail.
  for (const auto& [rows, width] : {std::pair{1, 1}, {5, 13}, {40, 67}}) {
    const Tensor h = randoms({rows, 2 * width}, 4.0), a = randoms({rows, width}), d_a = randoms({rows, width});
    const Tensor d_h = randoms({rows, 2 * width}), a_again = randoms({rows, width});
    swiglu_forward(context(), h, a);
    EXPECT_LE(relative_error(a, reference(doubles(h), static_cast<std::size_t>(width))),
              bound_for(dtype(), kForwardBound));
    swiglu_backward(context(), d_a, h, d_h, a_again);
    const Doubles expected = central_differences(
        [&](const Doubles& v) { return dot(reference(v, static_cast<std::size_t>(width)), doubles(d_a)); }, doubles(h));
    EXPECT_LE(relative_error(d_h, expected), bound_for(dtype(), kBackwardBound));
    EXPECT_LE(relative_error(a_again, doubles(a)), bound_for(dtype(), kForwardBound));
    const Doubles d_h_apart = doubles(d_h), a_apart = doubles(a_again);
    swiglu_backward(context(), d_a, h, h, d_a);  // in place
    EXPECT_EQ(doubles(h), d_h_apart);
    EXPECT_EQ(doubles(d_a), a_apart);
  }
}

TEST_P(SwiGlu, LargeGates) {
  const Tensor h = randoms({1, 4}), a = randoms({1, 2});
  const float gates[] = {200.0f, -200.0f};
  for (std::size_t i = 0; i < 2; ++i) {
    if (dtype() == DType::kFloat32) {
      h.data<float>()[i] = gates[i];
    } else {
      h.data<BFloat16>()[i] = BFloat16(gates[i]);
    }
  }
  swiglu_forward(context(), h, a);
  EXPECT_LE(relative_error(a, reference(doubles(h), 2)), bound_for(dtype(), kForwardBound));
}

// The expert's output is y = w · W2 · a. Here W2 is the identity, so d_a without the weight is d_y.
TEST_P(SwiGlu, WeightedRows) {
  constexpr std::int64_t kRows = 6, kUsed = 5, kWidth = 70;
  const Tensor h = randoms({kRows, 2 * kWidth}, 2.0), d_a = randoms({kRows, kWidth});
  const Tensor num_rows = ints({kUsed}), weights = random({kRows}), d_weights = random({kRows});
  const Tensor d_h = randoms({kRows, 2 * kWidth}), weighted_a = randoms({kRows, kWidth});
  const Doubles untouched = doubles(d_h.rows(kUsed, kRows));
  weights.data<float>()[2] = 0.0f;
  swiglu_backward_weighted(context(), d_a, h, weights, num_rows, d_h, weighted_a, d_weights);

  const auto loss = [&](const Doubles& h_values, const Doubles& w_values) {
    const Doubles a = reference(h_values, kWidth), g = doubles(d_a);
    double sum = 0.0;
    for (std::size_t r = 0; r < kUsed; ++r) {
      for (std::size_t j = 0; j < kWidth; ++j) sum += g[r * kWidth + j] * w_values[r] * a[r * kWidth + j];
    }
    return sum;
  };
  const Doubles d_h_expected =
      central_differences([&](const Doubles& v) { return loss(v, doubles(weights)); }, doubles(h.rows(0, kUsed)));
  EXPECT_LE(relative_error(d_h.rows(0, kUsed), d_h_expected), bound_for(dtype(), kBackwardBound));
  const Doubles d_weights_expected =
      central_differences([&](const Doubles& v) { return loss(doubles(h), v); }, doubles(weights));
  Doubles d_weights_actual = doubles(d_weights);
  d_weights_actual[kUsed] = 0.0;  // this row is not used
  EXPECT_LE(relative_error(d_weights_actual, d_weights_expected), kBackwardBound);
  Doubles weighted = reference(doubles(h.rows(0, kUsed)), kWidth);
  for (std::size_t i = 0; i < weighted.size(); ++i) {
    weighted[i] *= doubles(weights)[i / kWidth];
  }
  EXPECT_LE(relative_error(weighted_a.rows(0, kUsed), weighted), bound_for(dtype(), kForwardBound));
  EXPECT_EQ(doubles(d_h.rows(2, 3)), Doubles(2 * kWidth, 0.0));
  EXPECT_EQ(doubles(weighted_a.rows(2, 3)), Doubles(kWidth, 0.0));
  EXPECT_EQ(doubles(d_h.rows(kUsed, kRows)), untouched);
}

// There are several tasks of rows, and num_rows may cut one of them. Rows from num_rows on are not written. The call
// also works in place.
TEST_P(SwiGlu, WeightedRowsInPlace) {
  constexpr std::int64_t kRows = 80, kWidth = 9;
  for (const std::int32_t used : {0, 1, 40, 80}) {
    const Tensor h = randoms({kRows, 2 * kWidth}, 2.0), d_a = randoms({kRows, kWidth});
    const Tensor d_h = randoms({kRows, 2 * kWidth}), a = randoms({kRows, kWidth});
    const Tensor weights = random({kRows}), d_weights = random({kRows});
    const Doubles before[] = {doubles(h), doubles(d_a), doubles(d_h), doubles(a), doubles(d_weights)};
    swiglu_backward_weighted(context(), d_a, h, weights, ints({used}), d_h, a, d_weights);
    EXPECT_EQ(doubles(h), before[0]);
    EXPECT_EQ(doubles(d_a), before[1]);
    const Doubles d_h_apart = doubles(d_h), a_apart = doubles(a), d_weights_apart = doubles(d_weights);
    for (std::int32_t r = 0; r < kRows; ++r) {
      const auto at = static_cast<std::size_t>(r);
      const auto row = [&](const Doubles& values, std::int64_t width) {
        const auto begin = values.begin() + r * width;
        return Doubles(begin, begin + width);
      };
      const bool written = r < used;
      EXPECT_EQ(row(d_h_apart, 2 * kWidth) != row(before[2], 2 * kWidth), written) << r;
      EXPECT_EQ(row(a_apart, kWidth) != row(before[3], kWidth), written) << r;
      EXPECT_EQ(d_weights_apart[at] != before[4][at], written) << r;
      if (!written) continue;
      const Doubles unweighted = reference(row(before[0], 2 * kWidth), kWidth);
      EXPECT_NEAR(d_weights_apart[at], dot(unweighted, row(before[1], kWidth)), kBackwardBound) << r;
    }
    swiglu_backward_weighted(context(), d_a, h, weights, ints({used}), h, d_a, d_weights);
    const std::int64_t n = used;
    const Doubles after = doubles(h);
    for (std::size_t i = static_cast<std::size_t>(n * 2 * kWidth); i < before[0].size(); ++i) {
      ASSERT_EQ(after[i], before[0][i]) << "number " << i << " is of a row that is not in use";
    }
    EXPECT_EQ(doubles(h.rows(0, n)), doubles(d_h.rows(0, n)));
    EXPECT_EQ(doubles(d_a.rows(0, n)), doubles(a.rows(0, n)));
    EXPECT_EQ(doubles(d_weights), d_weights_apart);
  }
}

TEST_P(SwiGlu, LargeGatesBackward) {
  const Tensor h = randoms({1, 4}), d_a = randoms({1, 2}), d_h = randoms({1, 4}), a = randoms({1, 2});
  const Tensor gates = random({1, 2});
  gates.data<float>()[0] = 200.0f;
  gates.data<float>()[1] = -200.0f;
  convert(context(), gates, h.columns(0, 2));
  swiglu_backward(context(), d_a, h, d_h, a);
  const Doubles values = doubles(h), g = doubles(d_a);
  EXPECT_LE(relative_error(d_h, Doubles{g[0] * values[2], 0.0, g[0] * 200.0, 0.0}), bound_for(dtype(), kForwardBound));
}

TEST_P(SwiGlu, SameAtAnyNumberOfThreads) {
  const Tensor h = randoms({100, 34}), a = randoms({100, 17}), d_a = randoms({100, 17}), d_h = randoms({100, 34});
  expect_same_for_any_threads([&] { swiglu_backward(context(), d_a, h, d_h, a); }, {d_h, a});
}

TESSERA_BOTH_TYPES(SwiGlu);

}  // namespace
}  // namespace tessera
