#include "ops/attention/mla_decode.h"

#include "tests/ops/harness.h"

namespace tessera {
namespace {

class MlaDecode : public TypedOperatorTest {};

TEST_P(MlaDecode, StoresWhereItIsTold) {
  // Latent and k_rope are columns of wider matrices.
  const Tensor wide = randoms({3, 20}), cache = randoms({2, 4, 9});
  const Tensor latent = wide.columns(1, 7), rope = wide.columns(10, 13);
  Doubles expected = doubles(cache.reshape({8, 9}));
  const std::vector<std::size_t> slots = {1, 0, 1}, positions = {3, 0, 1};
  for (std::size_t t = 0; t < 3; ++t) {
    const Doubles l = doubles(latent.rows(static_cast<std::int64_t>(t), static_cast<std::int64_t>(t) + 1));
    const Doubles r = doubles(rope.rows(static_cast<std::int64_t>(t), static_cast<std::int64_t>(t) + 1));
    std::copy(l.begin(), l.end(), expected.begin() + static_cast<std::ptrdiff_t>((slots[t] * 4 + positions[t]) * 9));
    std::copy(r.begin(), r.end(),
              expected.begin() + static_cast<std::ptrdiff_t>((slots[t] * 4 + positions[t]) * 9 + 6));
  }
  store_latents(context(), latent, rope, ints({1, 0, 1}), ints({3, 0, 1}), cache);
  EXPECT_EQ(doubles(cache.reshape({8, 9})), expected);
  EXPECT_THROW(store_latents(context(), latent, rope, ints({1, 0, 2}), ints({3, 0, 1}), cache), InternalError);
  EXPECT_THROW(store_latents(context(), latent, rope, ints({1, 0, 1}), ints({4, 0, 1}), cache), InternalError);
}

/// Rotates the pair of numbers at `at` by an angle.
void turn(Doubles& x, std::size_t at, double angle) {
  const double even = x[at], odd = x[at + 1];
  x[at] = even * std::cos(angle) - odd * std::sin(angle);
  x[at + 1] = odd * std::cos(angle) + even * std::sin(angle);
}

// Latents of 6 numbers, k_rope of 4, and two heads of 7 numbers. A layer rotates the last 4 of each head, or nothing.
TEST_P(MlaDecode, NewTokensAreNormalisedRotatedAndStored) {
  constexpr std::size_t kLatent = 6, kRope = 4, kHead = 7, kRow = kLatent + kRope;
  const Tensor kv_a = randoms({2, kRow + 3}).columns(2, kRow + 2), norm_weight = randoms({kLatent});
  const Tensor angles = random({5, kRope / 2}), cos = random({5, kRope / 2}), sin = random({5, kRope / 2});
  for (std::int64_t i = 0; i < angles.num_elements(); ++i) {
    cos.data<float>()[i] = std::cos(angles.data<float>()[i]);
    sin.data<float>()[i] = std::sin(angles.data<float>()[i]);
  }
  const std::vector<std::size_t> positions = {4, 1};
  for (const std::int64_t rope_dim : {std::int64_t{kRope}, std::int64_t{0}}) {
    const Tensor q = randoms({2, 2 * kHead}), cache = randoms({3, 5, kRow});
    const Tensor wkv_b = randoms({2 * (kHead - kRope + 3), kLatent}), q_latent = randoms({2, 2 * kLatent});
    Doubles expected_q = doubles(q), expected = doubles(cache.reshape({15, kRow})), expected_latent(4 * kLatent);
    for (std::size_t i = 0; i < expected_latent.size(); ++i) {
      const std::size_t head = i / kLatent;  // of both tokens
      for (std::size_t k = 0; k < kHead - kRope; ++k) {
        const std::size_t row = head % 2 * (kHead - kRope + 3) + k;
        expected_latent[i] += expected_q[head * kHead + k] * doubles(wkv_b)[row * kLatent + i % kLatent];
      }
    }
    for (std::size_t t = 0; t < 2; ++t) {
      Doubles row = doubles(kv_a.rows(static_cast<std::int64_t>(t), static_cast<std::int64_t>(t) + 1));
      double squares = 0.0;
      for (std::size_t i = 0; i < kLatent; ++i) squares += row[i] * row[i];
      const double rstd = 1.0 / std::sqrt(squares / kLatent + 0.01);
      for (std::size_t i = 0; i < kLatent; ++i) row[i] *= rstd * doubles(norm_weight)[i];
      for (std::size_t pair = 0; pair < static_cast<std::size_t>(rope_dim / 2); ++pair) {
        const double angle = doubles(angles)[positions[t] * (kRope / 2) + pair];
        turn(row, kLatent + 2 * pair, angle);
        for (std::size_t h = 0; h < 2; ++h) turn(expected_q, (2 * t + h + 1) * kHead - kRope + 2 * pair, angle);
      }
      std::ranges::copy(row, expected.begin() + static_cast<std::ptrdiff_t>(((2 - t) * 5 + positions[t]) * kRow));
    }
    const auto prepare_with = [&](const Context& op, std::int32_t last_position) {
      prepare_mla_decode(op,
                         {.kv_a = kv_a,
                          .norm_weight_C = norm_weight,
                          .norm_eps = 0.01f,
                          .q = q,
                          .wkv_b = wkv_b,
                          .q_latent = q_latent,
                          .num_heads = 2,
                          .rope_dim = rope_dim,
                          .cos_PM = cos,
                          .sin_PM = sin},
                         ints({2, 1}), ints({4, last_position}), cache);
    };
    const auto prepare = [&](std::int32_t last_position) { prepare_with(context(), last_position); };
    prepare(1);
    EXPECT_LE(relative_error(cache.reshape({15, kRow}), expected), bound_for(dtype(), kForwardBound));
    EXPECT_LE(relative_error(q, expected_q), bound_for(dtype(), kForwardBound));
    EXPECT_LE(relative_error(q_latent, expected_latent), bound_for(dtype(), kForwardBound));
    EXPECT_THROW(prepare(5), InternalError);
    expect_measured([&](const Context& op) { prepare_with(op, 1); });
  }
}

/// Returns one token's output, from the formula, in float64.
Doubles reference(const MlaDecodeDims& dims, const Doubles& q, const Doubles& q_latent, const Doubles& wkv_b,
                  const Doubles& cache, std::size_t num_positions) {
  const auto latent = static_cast<std::size_t>(dims.dim_latent), rope = static_cast<std::size_t>(dims.dim_rope);
  const auto nope = static_cast<std::size_t>(dims.dim_nope), row = latent + rope;
  Doubles o;
  for (std::size_t h = 0; h < static_cast<std::size_t>(dims.num_heads); ++h) {
    Doubles weights;
    double total = 0.0;
    for (std::size_t p = 0; p < num_positions; ++p) {
      double score = 0.0;
      for (std::size_t i = 0; i < latent; ++i) score += q_latent[h * latent + i] * cache[p * row + i];
      for (std::size_t i = 0; i < rope; ++i) score += q[h * (nope + rope) + nope + i] * cache[p * row + latent + i];
      weights.push_back(std::exp(static_cast<double>(dims.scale) * score));
      total += weights.back();
    }
    Doubles sums;
    for (std::size_t i = 0; i < latent; ++i) {
      double sum = 0.0;
      for (std::size_t p = 0; p < num_positions; ++p) sum += weights[p] / total * cache[p * row + i];
      sums.push_back(sum);
    }
    const auto dim_v = static_cast<std::size_t>(dims.dim_v);
    for (std::size_t v = 0; v < dim_v; ++v) {
      const std::size_t w_row = h * (nope + dim_v) + nope + v;
      o.push_back(0.0);
      for (std::size_t i = 0; i < latent; ++i) o.back() += wkv_b[w_row * latent + i] * sums[i];
    }
  }
  return o;
}

TEST_P(MlaDecode, IsTheFormula) {
  struct Shapes {
    MlaDecodeDims dims;
    std::int64_t positions;
  };
  const Shapes cases[] = {
      {{.num_heads = 1, .dim_nope = 1, .dim_rope = 2, .dim_latent = 1, .dim_v = 2, .scale = 1.0f}, 1},
      {{.num_heads = 5, .dim_nope = 6, .dim_rope = 4, .dim_latent = 19, .dim_v = 5, .scale = 0.7f},
       33},  // the heads leave a tail
      {{.num_heads = 4, .dim_nope = 128, .dim_rope = 64, .dim_latent = 512, .dim_v = 128, .scale = 0.07f}, 70},
      // The weights are nearly one-hot.
      {{.num_heads = 3, .dim_nope = 4, .dim_rope = 2, .dim_latent = 40, .dim_v = 4, .scale = 20.0f}, 50},
  };
  for (const auto& [dims, positions] : cases) {
    const std::int64_t heads = dims.num_heads, row = dims.dim_latent + dims.dim_rope;
    const Tensor q = randoms({3, heads * (dims.dim_nope + dims.dim_rope)}),
                 q_latent = randoms({3, heads * dims.dim_latent});
    const Tensor cache = randoms({2, positions, row}), o = randoms({3, heads * dims.dim_v});
    const Tensor wkv_b = randoms({heads * (dims.dim_nope + dims.dim_v), dims.dim_latent});
    const std::vector<std::int32_t> slots = {1, 0, 1};
    const std::vector<std::int32_t> at = {static_cast<std::int32_t>(positions - 1), 0,
                                          static_cast<std::int32_t>(positions / 2)};
    mla_decode(context(), dims,
               {.q = q,
                .q_latent = q_latent,
                .wkv_b = wkv_b,
                .cache_SPN = cache,
                .slot_T = ints(slots),
                .position_T = ints(at)},
               o);
    for (std::int64_t t = 0; t < 3; ++t) {
      const auto i = static_cast<std::size_t>(t);
      const Doubles expected = reference(dims, doubles(q.rows(t, t + 1)), doubles(q_latent.rows(t, t + 1)),
                                         doubles(wkv_b), doubles(cache[slots[i]]), static_cast<std::size_t>(at[i]) + 1);
      EXPECT_LE(relative_error(o.rows(t, t + 1), expected), bound_for(dtype(), kForwardBound)) << "token " << t;
    }
  }
}

TEST_P(MlaDecode, PositionsOutsideTheCacheThrow) {
  const MlaDecodeDims dims{.num_heads = 1, .dim_nope = 2, .dim_rope = 2, .dim_latent = 3, .dim_v = 2, .scale = 1.0f};
  const Tensor q = randoms({1, 4}), q_latent = randoms({1, 3}), wkv_b = randoms({4, 3});
  const Tensor cache = randoms({1, 6, 5}), o = randoms({1, 2});
  const auto decode = [&](std::int32_t slot, std::int32_t position) {
    mla_decode(context(), dims,
               {.q = q,
                .q_latent = q_latent,
                .wkv_b = wkv_b,
                .cache_SPN = cache,
                .slot_T = ints({slot}),
                .position_T = ints({position})},
               o);
  };
  decode(0, 5);
  EXPECT_THROW(decode(0, 6), InternalError);
  EXPECT_THROW(decode(1, 5), InternalError);
  EXPECT_THROW(decode(0, -1), InternalError);
}

TESSERA_BOTH_TYPES(MlaDecode);

}  // namespace
}  // namespace tessera
