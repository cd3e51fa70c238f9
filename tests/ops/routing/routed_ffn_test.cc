#include "ops/routing/routed_ffn.h"

#include "tests/ops/harness.h"

namespace tessera {
namespace {

class RoutedFfnTest : public TypedOperatorTest {
 protected:
  /// Returns experts with random weights, and choices for which token t has (t · stride + k) mod E as its k-th expert.
  RoutedFfn experts(std::int64_t num_tokens, std::int64_t num_experts, std::int64_t top_k, std::int64_t dim,
                    std::int64_t hidden, std::int64_t stride) {
    std::vector<std::int32_t> ids, counts(static_cast<std::size_t>(num_experts));
    for (std::int64_t t = 0; t < num_tokens; ++t) {
      for (std::int64_t k = 0; k < top_k; ++k) ids.push_back(static_cast<std::int32_t>((t * stride + k) % num_experts));
    }
    for (const std::int32_t id : ids) ++counts[static_cast<std::size_t>(id)];
    return {.w13_E2FD = randoms({num_experts, 2 * hidden, dim}),
            .w2_EDF = randoms({num_experts, dim, hidden}),
            .expert_ids_TK = ints(ids, {num_tokens, top_k}),
            .weights_TK = random({num_tokens, top_k}),
            .counts_E = ints(counts)};
  }
};

/// Returns the product of a matrix with `rows` rows, row by row, and a vector.
Doubles times(const Doubles& matrix, std::size_t rows, const Doubles& x) {
  Doubles y(rows);
  for (std::size_t r = 0; r < rows; ++r) {
    for (std::size_t i = 0; i < x.size(); ++i) y[r] += matrix[r * x.size() + i] * x[i];
  }
  return y;
}

/// Returns a token's output, from the formula, in float64.
Doubles reference(const RoutedFfn& experts, const Doubles& y, std::int64_t t) {
  const Doubles weights = doubles(experts.weights_TK.rows(t, t + 1));
  const auto hidden = static_cast<std::size_t>(experts.w2_EDF.dim(2));
  Doubles sum(y.size());
  for (std::size_t k = 0; k < weights.size(); ++k) {
    const std::int64_t slot = t * experts.expert_ids_TK.dim(1) + static_cast<std::int64_t>(k);
    const std::int32_t expert = experts.expert_ids_TK.data<std::int32_t>()[slot];
    const Doubles h = times(doubles(experts.w13_E2FD[expert]), 2 * hidden, y);
    Doubles a(hidden);
    for (std::size_t f = 0; f < hidden; ++f) a[f] = h[f] / (1.0 + std::exp(-h[f])) * h[hidden + f];
    const Doubles out = times(doubles(experts.w2_EDF[expert]), y.size(), a);
    for (std::size_t d = 0; d < sum.size(); ++d) sum[d] += weights[k] * out[d];
  }
  return sum;
}

TEST_P(RoutedFfnTest, IsTheFormula) {
  struct Case {
    std::int64_t num_tokens, num_experts, top_k, dim, hidden, stride;
  };
  // One expert, tokens that share some of their experts, tokens that share all of them, and more tokens than experts.
  for (const Case& c : {Case{1, 1, 1, 3, 2, 1}, {3, 7, 3, 40, 24, 2}, {4, 8, 2, 16, 8, 8}, {20, 4, 4, 33, 17, 1}}) {
    SCOPED_TRACE(fmt::format("{} tokens, {} experts, {} of them", c.num_tokens, c.num_experts, c.top_k));
    const RoutedFfn ffn = experts(c.num_tokens, c.num_experts, c.top_k, c.dim, c.hidden, c.stride);
    const Tensor y = randoms({c.num_tokens, c.dim}), out = randoms({c.num_tokens, c.dim});
    routed_ffn(context(), y, ffn, out);
    for (std::int64_t t = 0; t < c.num_tokens; ++t) {
      EXPECT_LE(relative_error(out.rows(t, t + 1), reference(ffn, doubles(y.rows(t, t + 1)), t)),
                bound_for(dtype(), kForwardBound))
          << "token " << t;
    }
  }
}

TEST_P(RoutedFfnTest, NeedsAsMuchScratchAsMeasured) {
  const RoutedFfn ffn = experts(3, 4, 2, 16, 8, 1);
  const Tensor y = randoms({3, 16}), out = randoms({3, 16});
  expect_measured([&](const Context& op) { routed_ffn(op, y, ffn, out); });
}

TESSERA_BOTH_TYPES(RoutedFfnTest);

}  // namespace
}  // namespace tessera
