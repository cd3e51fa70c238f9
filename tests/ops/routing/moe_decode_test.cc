#include "ops/routing/moe_decode.h"

#include "tests/ops/harness.h"

namespace tessera {
namespace {

class MoeDecode : public TypedOperatorTest {
 protected:
  struct Sizes {
    std::int64_t num_tokens, num_experts, top_k, dim, hidden, shared_hidden;
  };
  /// Returns experts with random weights, and choices for which token t has (t · stride + k) mod E as its k-th expert.
  MoeDecodeOperands experts(const Sizes& sizes, std::int64_t stride) {
    const auto& [num_tokens, num_experts, top_k, dim, hidden, shared_hidden] = sizes;
    std::vector<std::int32_t> ids, counts(static_cast<std::size_t>(num_experts));
    for (std::int64_t t = 0; t < num_tokens; ++t) {
      for (std::int64_t k = 0; k < top_k; ++k) ids.push_back(static_cast<std::int32_t>((t * stride + k) % num_experts));
    }
    for (const std::int32_t id : ids) ++counts[static_cast<std::size_t>(id)];
    return {.w13_E2FD = randoms({num_experts, 2 * hidden, dim}),
            .w2_EDF = randoms({num_experts, dim, hidden}),
            .shared_w13_2ID = shared_hidden > 0 ? randoms({2 * shared_hidden, dim}) : Tensor(),
            .shared_w2_DI = shared_hidden > 0 ? randoms({dim, shared_hidden}) : Tensor(),
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

/// Returns W2 · swiglu(W13 · y), in float64.
Doubles ffn(const Tensor& w13, const Tensor& w2, const Doubles& y) {
  const auto hidden = static_cast<std::size_t>(w2.dim(1));
  const Doubles h = times(doubles(w13), 2 * hidden, y);
  Doubles a(hidden);
  for (std::size_t f = 0; f < hidden; ++f) a[f] = h[f] / (1.0 + std::exp(-h[f])) * h[hidden + f];
  return times(doubles(w2), y.size(), a);
}

/// Returns a token's output, from the formula, in float64.
Doubles reference(const MoeDecodeOperands& experts, const Doubles& x, const Doubles& y, std::int64_t t) {
  const Doubles weights = doubles(experts.weights_TK.rows(t, t + 1));
  Doubles sum = x;
  const auto add = [&](double weight, const Doubles& out) {
    for (std::size_t d = 0; d < sum.size(); ++d) sum[d] += weight * out[d];
  };
  if (experts.shared_w2_DI.defined()) add(1.0, ffn(experts.shared_w13_2ID, experts.shared_w2_DI, y));
  for (std::size_t k = 0; k < weights.size(); ++k) {
    const std::int64_t slot = t * experts.expert_ids_TK.dim(1) + static_cast<std::int64_t>(k);
    const std::int32_t expert = experts.expert_ids_TK.data<std::int32_t>()[slot];
    add(weights[k], ffn(experts.w13_E2FD[expert], experts.w2_EDF[expert], y));
  }
  return sum;
}

TEST_P(MoeDecode, IsTheFormula) {
  struct Case {
    Sizes sizes;
    std::int64_t stride;
  };
  // One expert, tokens that share some of their experts, tokens that share all of them, and more tokens than experts.
  for (const auto& [sizes, stride] : {Case{{1, 1, 1, 3, 2, 0}, 1},
                                      {{3, 7, 3, 40, 24, 24}, 2},
                                      {{4, 8, 2, 16, 8, 16}, 8},
                                      {{20, 4, 4, 33, 17, 51}, 1}}) {
    SCOPED_TRACE(fmt::format("{} tokens, {} experts, {} of them, {} shared numbers", sizes.num_tokens,
                             sizes.num_experts, sizes.top_k, sizes.shared_hidden));
    const MoeDecodeOperands operands = experts(sizes, stride);
    const Shape shape{sizes.num_tokens, sizes.dim};
    const Tensor x = randoms(shape), y = randoms(shape), out = randoms(shape);
    moe_decode(context(), x, y, operands, out);
    for (std::int64_t t = 0; t < sizes.num_tokens; ++t) {
      const Doubles expected = reference(operands, doubles(x.rows(t, t + 1)), doubles(y.rows(t, t + 1)), t);
      EXPECT_LE(relative_error(out.rows(t, t + 1), expected), bound_for(dtype(), kForwardBound)) << "token " << t;
    }
  }
}

TEST_P(MoeDecode, NeedsAsMuchScratchAsMeasured) {
  const MoeDecodeOperands operands = experts({3, 4, 2, 16, 8, 16}, 1);
  const Tensor x = randoms({3, 16}), y = randoms({3, 16}), out = randoms({3, 16});
  expect_measured([&](const Context& op) { moe_decode(op, x, y, operands, out); });
}

// The kernels compute the shared experts' hidden numbers in parts as wide as an expert.
TEST_P(MoeDecode, SharedExpertsAreAMultipleOfRoutedOnes) {
  const MoeDecodeOperands operands = experts({1, 2, 1, 8, 8, 12}, 1);
  const Tensor x = randoms({1, 8});
  EXPECT_THROW(moe_decode(context(), x, x, operands, x), InternalError);
}

TESSERA_BOTH_TYPES(MoeDecode);

}  // namespace
}  // namespace tessera
