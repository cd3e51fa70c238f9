#include "ops/attention/rope.h"

#include "tests/ops/harness.h"

namespace tessera {
namespace {

class Rope : public TypedOperatorTest {
 protected:
  const Tensor positions_ = ints({0, 3, 1, 4, 2});
  const Tensor cos_ = random({5, 3}), sin_ = random({5, 3});

  /// Turns pairs by any cosines and sines: (a, b) becomes (a·c - b·s, b·c + a·s). The transpose is the gradient.
  Doubles reference(const Doubles& x, std::size_t heads, std::size_t head_dim, double sign) const {
    Doubles y = x;
    const Doubles c = doubles(cos_), s = doubles(sin_);
    for (std::size_t t = 0; t < 5; ++t) {
      const auto p = static_cast<std::size_t>(positions_.data<std::int32_t>()[t]);
      for (std::size_t h = 0; h < heads; ++h) {
        for (std::size_t i = 0; i < 3; ++i) {
          const std::size_t at = (t * heads + h) * head_dim + head_dim - 6 + 2 * i;
          y[at] = x[at] * c[p * 3 + i] - sign * x[at + 1] * s[p * 3 + i];
          y[at + 1] = x[at + 1] * c[p * 3 + i] + sign * x[at] * s[p * 3 + i];
        }
      }
    }
    return y;
  }
};

TEST_P(Rope, TurnsTheEndOfEachHeadInPlace) {
  for (const auto& [direction, sign] : {std::pair{RopeDirection::kForward, 1.0}, {RopeDirection::kBackward, -1.0}}) {
    const Tensor x = randoms({5, 2 * 10});
    const Doubles expected = reference(doubles(x), 2, 10, sign);
    rope(context(), x, 2, 6, positions_, cos_, sin_, direction, x);
    EXPECT_LE(relative_error(x, expected), bound_for(dtype(), kForwardBound));
  }
}

TEST_P(Rope, BackwardIsTheGradient) {
  const Tensor x = randoms({5, 6}), d_y = randoms({5, 6}), d_x = randoms({5, 6});
  rope(context(), d_y, 1, 6, positions_, cos_, sin_, RopeDirection::kBackward, d_x);
  const Doubles expected =
      central_differences([&](const Doubles& v) { return dot(reference(v, 1, 6, 1.0), doubles(d_y)); }, doubles(x));
  EXPECT_LE(relative_error(d_x, expected), bound_for(dtype(), kBackwardBound));
}

TEST_P(Rope, FromColumnsToColumns) {
  const Tensor from = randoms({5, 16}), to = randoms({5, 20});
  const Doubles beside = doubles(to.columns(0, 14)), expected = reference(doubles(from.columns(10, 16)), 1, 6, 1.0);
  rope(context(), from.columns(10, 16), 1, 6, positions_, cos_, sin_, RopeDirection::kForward, to.columns(14, 20));
  EXPECT_LE(relative_error(to.columns(14, 20), expected), bound_for(dtype(), kForwardBound));
  EXPECT_EQ(doubles(to.columns(0, 14)), beside);
}

// There are several tasks of tokens, whole vectors of pairs, and a tail. Heads have rotated columns only, and the
// output is out of place.
TEST_P(Rope, ManyTokensAndPairs) {
  constexpr std::int64_t kTokens = 75, kHeads = 3, kPairs = 35, kPositions = 9;
  const Tensor x = randoms({kTokens, kHeads * 2 * kPairs}), y = randoms({kTokens, kHeads * 2 * kPairs});
  const Tensor cos = random({kPositions, kPairs}), sin = random({kPositions, kPairs});
  std::vector<std::int32_t> positions;
  for (std::int64_t t = 0; t < kTokens; ++t) positions.push_back(static_cast<std::int32_t>(t * 4 % kPositions));
  rope(context(), x, kHeads, 2 * kPairs, ints(positions), cos, sin, RopeDirection::kForward, y);
  const Doubles from = doubles(x), c = doubles(cos), s = doubles(sin);
  Doubles expected;
  for (std::size_t pair = 0; pair < from.size() / 2; ++pair) {
    const auto position = static_cast<std::size_t>(positions[pair / (kHeads * kPairs)]);
    const std::size_t angle = position * kPairs + pair % kPairs;
    expected.push_back(from[2 * pair] * c[angle] - from[2 * pair + 1] * s[angle]);
    expected.push_back(from[2 * pair + 1] * c[angle] + from[2 * pair] * s[angle]);
  }
  EXPECT_LE(relative_error(y, expected), bound_for(dtype(), kForwardBound));
  rope(context(), x, kHeads, 2 * kPairs, ints(positions), cos, sin, RopeDirection::kForward, x);  // in place
  EXPECT_EQ(doubles(x), doubles(y));
}

TEST_P(Rope, OutOfPlaceWithOtherColumnsThrows) {
  EXPECT_THROW(
      rope(context(), randoms({5, 20}), 2, 6, positions_, cos_, sin_, RopeDirection::kForward, randoms({5, 20})),
      InternalError);
  const Tensor odd = randoms({5, 10});
  EXPECT_THROW(rope(context(), odd, 2, 3, positions_, cos_, sin_, RopeDirection::kForward, odd), InternalError);
}

TESSERA_BOTH_TYPES(Rope);

}  // namespace
}  // namespace tessera
