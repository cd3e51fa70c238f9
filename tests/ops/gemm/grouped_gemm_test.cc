#include "ops/gemm/grouped_gemm.h"

#include "tests/ops/harness.h"

namespace tessera {
namespace {

class GroupedGemm : public TypedOperatorTest {
 protected:
  /// Checks the products of x [rows, n] and w [experts, m, n], with `counts` rows per expert. There are three rows more
  /// than are used.
  void check(const std::vector<std::int32_t>& counts, std::int64_t m, std::int64_t n) {
    const auto experts = static_cast<std::int64_t>(counts.size());
    std::vector<std::int32_t> offsets = {0};
    for (const std::int32_t count : counts) offsets.push_back(offsets.back() + count);
    const std::int64_t used = offsets.back(), rows = used + 3;
    const Tensor offsets_E1 = ints(offsets);
    const Tensor x = randoms({rows, n}), w = randoms({experts, m, n}), d_y = randoms({rows, m});
    const Tensor y = randoms({rows, m}), d_x = randoms({rows, n}), d_w = random({experts, m, n});
    Doubles y_expected = doubles(y), d_x_expected = doubles(d_x), d_w_expected = doubles(d_w);
    const Doubles xs = doubles(x), ws = doubles(w), gs = doubles(d_y);
    const auto columns_m = static_cast<std::size_t>(m), columns_n = static_cast<std::size_t>(n);
    for (std::size_t e = 0; e < counts.size(); ++e) {
      for (auto r = static_cast<std::size_t>(offsets[e]); r < static_cast<std::size_t>(offsets[e + 1]); ++r) {
        for (std::size_t j = 0; j < columns_n; ++j) d_x_expected[r * columns_n + j] = 0.0;
        for (std::size_t i = 0; i < columns_m; ++i) {
          double sum = 0.0;
          for (std::size_t j = 0; j < columns_n; ++j) {
            const std::size_t at = (e * columns_m + i) * columns_n + j;
            sum += xs[r * columns_n + j] * ws[at];
            d_x_expected[r * columns_n + j] += gs[r * columns_m + i] * ws[at];
            d_w_expected[at] += gs[r * columns_m + i] * xs[r * columns_n + j];
          }
          y_expected[r * columns_m + i] = sum;
        }
      }
    }
    grouped_linear_forward(context(), x, w, offsets_E1, y);
    grouped_linear_dgrad(context(), d_y, w, offsets_E1, d_x);
    grouped_linear_wgrad(context(), d_y, x, offsets_E1, d_w);
    EXPECT_LE(relative_error(y, y_expected), bound_for(dtype(), kForwardBound)) << m << " " << n;
    EXPECT_LE(relative_error(d_x, d_x_expected), bound_for(dtype(), kForwardBound)) << m << " " << n;
    EXPECT_LE(relative_error(d_w, d_w_expected), kForwardBound) << m << " " << n;
    // Rows beyond the last expert's stay unchanged.
    for (const auto& [actual, expected] : {std::pair{&y, &y_expected}, {&d_x, &d_x_expected}}) {
      const Doubles tail = doubles(actual->rows(used, rows));
      EXPECT_TRUE(std::equal(tail.begin(), tail.end(), expected->end() - static_cast<std::ptrdiff_t>(tail.size())));
    }
  }
};

TEST_P(GroupedGemm, Sizes) {
  check({1}, 1, 1);
  check({5, 3}, 7, 9);           // all sizes are odd: bfloat16 pairs span the end
  check({4, 12, 2}, 33, 31);     // a panel and one column; a panel less one column
  check({70, 1, 65}, 160, 130);  // several blocks of rows, columns and k
  check({300}, 20, 36);          // more rows than a weight gradient takes at once
}

TEST_P(GroupedGemm, AnySkew) {
  check({0, 0, 9, 0}, 16, 24);  // one expert gets all rows
  check({0, 0}, 16, 24);        // there are no rows
  check({3, 0, 5, 1, 0}, 16, 24);
}

// Rows that are a multiple of 4 KiB apart are packed, so that they do not compete for cache lines.
TEST_P(GroupedGemm, RowsThatAlias) {
  check({5, 13}, 7, 2048);
  check({5, 13}, 2048, 7);
}

TEST_P(GroupedGemm, EveryInstructionSet) {
  for_every_instruction_set([&] {
    check({1}, 1, 1);
    check({5, 3}, 7, 9);
    check({4, 0, 12, 2}, 33, 31);
    check({70, 1, 65}, 160, 130);
    check({300}, 20, 36);
    check({5, 13}, 7, 2048);
  });
}

TEST_P(GroupedGemm, BackwardIsTheGradient) {
  constexpr std::size_t kRows = 5, kM = 4, kN = 3;
  const std::vector<std::int32_t> expert_of = {0, 0, 0, 2, 2};
  const Tensor offsets = ints({0, 3, 3, 5}), x = randoms({kRows, kN}), w = randoms({3, kM, kN});
  const Tensor d_y = randoms({kRows, kM}), d_x = randoms({kRows, kN}), d_w = random({3, kM, kN});
  const Doubles d_w_before = doubles(d_w), g = doubles(d_y);
  grouped_linear_dgrad(context(), d_y, w, offsets, d_x);
  grouped_linear_wgrad(context(), d_y, x, offsets, d_w);
  const auto loss = [&](const Doubles& xs, const Doubles& ws) {
    double sum = 0.0;
    for (std::size_t r = 0; r < kRows; ++r) {
      for (std::size_t i = 0; i < kM; ++i) {
        for (std::size_t j = 0; j < kN; ++j) {
          sum += g[r * kM + i] * xs[r * kN + j] * ws[(static_cast<std::size_t>(expert_of[r]) * kM + i) * kN + j];
        }
      }
    }
    return sum;
  };
  EXPECT_LE(relative_error(d_x, central_differences([&](const Doubles& v) { return loss(v, doubles(w)); }, doubles(x))),
            bound_for(dtype(), kBackwardBound));
  EXPECT_LE(
      relative_error(d_w, plus(d_w_before,
                               central_differences([&](const Doubles& v) { return loss(doubles(x), v); }, doubles(w)))),
      kBackwardBound);
}

TEST_P(GroupedGemm, SameAtAnyNumberOfThreads) {
  const Tensor offsets = ints({0, 90, 100, 170});
  const Tensor x = randoms({170, 140}), w = randoms({3, 150, 140}), d_y = randoms({170, 150});
  const Tensor y = randoms({170, 150}), d_x = randoms({170, 140}), d_w = random({3, 150, 140});
  expect_same_for_any_threads(
      [&] {
        std::fill_n(d_w.data<float>(), d_w.num_elements(), 0.0f);
        grouped_linear_forward(context(), x, w, offsets, y);
        grouped_linear_dgrad(context(), d_y, w, offsets, d_x);
        grouped_linear_wgrad(context(), d_y, x, offsets, d_w);
      },
      {y, d_x, d_w});
}

TEST_P(GroupedGemm, WrongShapesThrow) {
  EXPECT_THROW(grouped_linear_forward(context(), randoms({4, 5}), randoms({2, 3, 6}), ints({0, 2, 4}), randoms({4, 3})),
               InternalError);
  EXPECT_THROW(grouped_linear_forward(context(), randoms({4, 6}), randoms({2, 3, 6}), ints({0, 4}), randoms({4, 3})),
               InternalError);
}

TESSERA_BOTH_TYPES(GroupedGemm);

}  // namespace
}  // namespace tessera
