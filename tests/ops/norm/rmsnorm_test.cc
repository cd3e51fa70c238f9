#include "ops/norm/rmsnorm.h"

#include "tests/ops/harness.h"

namespace tessera {
namespace {

constexpr float kEps = 1e-5f;

Doubles reference(const Doubles& x, const Doubles& w) {
  const std::size_t n = w.size();
  Doubles y(x.size());
  for (std::size_t row = 0; row < x.size() / n; ++row) {
    double squares = 0.0;
    for (std::size_t j = 0; j < n; ++j) squares += x[row * n + j] * x[row * n + j];
    const double rstd = 1.0 / std::sqrt(squares / static_cast<double>(n) + static_cast<double>(kEps));
    for (std::size_t j = 0; j < n; ++j) y[row * n + j] = x[row * n + j] * rstd * w[j];
  }
  return y;
}

class RmsNorm : public TypedOperatorTest {
 protected:
  void check(const Tensor& x, const Tensor& d_x, Write write) {
    const std::int64_t rows = x.dim(0), n = x.dim(1);
    const Tensor w = randoms({n}), y = randoms({rows, n}), rstd = random({rows}), d_y = randoms({rows, n}),
                 d_w = random({n});
    const Doubles d_w_before = doubles(d_w), d_x_before = doubles(d_x);
    rmsnorm_forward(context(), x, w, kEps, y, rstd);
    rmsnorm_backward(context(), d_y, x, w, rstd, d_x, write, d_w);
    EXPECT_LE(relative_error(y, reference(doubles(x), doubles(w))), bound_for(dtype(), kForwardBound));
    Doubles expected =
        central_differences([&](const Doubles& v) { return dot(reference(v, doubles(w)), doubles(d_y)); }, doubles(x));
    if (write == Write::kAccumulate) expected = plus(expected, d_x_before);
    EXPECT_LE(relative_error(d_x, expected), bound_for(dtype(), kBackwardBound));
    expected =
        central_differences([&](const Doubles& v) { return dot(reference(doubles(x), v), doubles(d_y)); }, doubles(w));
    EXPECT_LE(relative_error(d_w, plus(expected, d_w_before)), bound_for(dtype(), kBackwardBound));
  }
};

TEST_P(RmsNorm, SizesAndWrites) {
  // The sizes are one row, fewer columns than lanes, a tail, and more rows than a task has. (One column has no gradient
  // but that of eps.)
  for (const auto& [rows, n] : {std::pair{1, 3}, {3, 7}, {5, 37}, {70, 16}}) {
    for (const Write write : {Write::kAssign, Write::kAccumulate}) check(randoms({rows, n}), randoms({rows, n}), write);
  }
}

TEST_P(RmsNorm, ColumnsOfWiderMatrices) {
  const Tensor wide_d_x = randoms({6, 30});
  const Doubles beside = doubles(wide_d_x.columns(20, 30));
  check(randoms({6, 30}).columns(0, 20), wide_d_x.columns(0, 20), Write::kAssign);
  EXPECT_EQ(doubles(wide_d_x.columns(20, 30)), beside);
}

// eps counts in small rows, and in rows of zeros, whose norm is zero and not NaN.
TEST_P(RmsNorm, SmallAndZeroRows) {
  check(randoms({4, 19}, 3e-3), randoms({4, 19}), Write::kAssign);
  const Tensor x = randoms({2, 5}, 0.0), w = randoms({5}), y = randoms({2, 5}), rstd = random({2});
  rmsnorm_forward(context(), x, w, kEps, y, rstd);
  EXPECT_EQ(doubles(y), Doubles(10, 0.0));
  EXPECT_LE(relative_error(rstd, Doubles(2, 1.0 / std::sqrt(static_cast<double>(kEps)))), kForwardBound);
}

TEST_P(RmsNorm, StatisticsAreFloat32) {
  // In bfloat16 a sum of 3000 squares would stall. The mean is 1/3.
  const Tensor x = randoms({1, 3000}), w = randoms({3000}), y = randoms({1, 3000}), rstd = random({1});
  rmsnorm_forward(context(), x, w, kEps, y, rstd);
  const double mean = dot(doubles(x), doubles(x)) / 3000.0;
  EXPECT_LE(relative_error(rstd, {1.0 / std::sqrt(mean + static_cast<double>(kEps))}), kForwardBound);
}

TEST_P(RmsNorm, WithResidual) {
  const Tensor x = randoms({5, 20}), delta = randoms({5, 20}), w = randoms({20}), sum = randoms({5, 20});
  const Tensor y = randoms({5, 20}), rstd = random({5}), again = randoms({5, 20}), rstd_again = random({5});
  residual_rmsnorm_forward(context(), x, delta, w, kEps, sum, y, rstd);
  EXPECT_LE(relative_error(sum, plus(doubles(x), doubles(delta))), bound_for(dtype(), kForwardBound));
  rmsnorm_forward(context(), sum, w, kEps, again, rstd_again);  // the norm of the rounded sum has the same bits
  EXPECT_EQ(doubles(y), doubles(again));
  EXPECT_EQ(doubles(rstd), doubles(rstd_again));
}

TEST_P(RmsNorm, SameAtAnyNumberOfThreads) {
  const Tensor x = randoms({200, 33}), w = randoms({33}), d_y = randoms({200, 33});
  const Tensor y = randoms({200, 33}), rstd = random({200}), d_x = randoms({200, 33}), d_w = random({33});
  expect_same_for_any_threads(
      [&] {
        std::fill_n(d_w.data<float>(), 33, 0.0f);
        rmsnorm_forward(context(), x, w, kEps, y, rstd);
        rmsnorm_backward(context(), d_y, x, w, rstd, d_x, Write::kAssign, d_w);
      },
      {y, rstd, d_x, d_w});
}

TESSERA_BOTH_TYPES(RmsNorm);

}  // namespace
}  // namespace tessera
