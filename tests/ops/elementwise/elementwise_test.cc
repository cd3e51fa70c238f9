#include "ops/elementwise/elementwise.h"

#include <limits>

#include "tests/ops/harness.h"

namespace tessera {
namespace {

class Elementwise : public TypedOperatorTest {};

TEST_P(Elementwise, ConvertsBothWaysStrided) {
  const Tensor from = randoms({7, 50}).columns(3, 40), wide = random({7, 37}), back = randoms({7, 60});
  const Doubles beside = doubles(back.columns(0, 20));
  convert(context(), from, wide);
  EXPECT_EQ(doubles(wide), doubles(from));
  convert(context(), wide, back.columns(20, 57));
  EXPECT_EQ(doubles(back.columns(20, 57)), doubles(from));
  EXPECT_EQ(doubles(back.columns(0, 20)), beside);
}

TEST_P(Elementwise, AddsInPlaceAndMixed) {
  const Tensor a = randoms({40, 1000}), b = random({40, 1000}), c = randoms({40, 1000});
  Doubles expected = plus(doubles(a), doubles(b));
  add(context(), a, b, a);
  EXPECT_LE(relative_error(a, expected), bound_for(dtype(), kForwardBound));
  expected = plus(doubles(a), doubles(c));
  const Tensor sum = randoms({40, 1000});
  add(context(), a, c, sum);
  EXPECT_LE(relative_error(sum, expected), bound_for(dtype(), kForwardBound));
}

TEST_P(Elementwise, AddsThree) {
  const Tensor a = randoms({40, 1000}), b = randoms({40, 1000}), c = randoms({40, 1000}), sum = randoms({40, 1000});
  const Doubles expected = plus(doubles(a), plus(doubles(b), doubles(c)));
  add(context(), a, b, sum, c);
  EXPECT_LE(relative_error(sum, expected), bound_for(dtype(), kForwardBound));
  add(context(), a, b, c, c);
  EXPECT_EQ(doubles(c), doubles(sum));
}

TEST_P(Elementwise, AddsIntoEitherOperand) {
  const Tensor a = randoms({3, 50}), b = randoms({3, 50}), sum = randoms({3, 50});
  add(context(), a, b, sum);
  const Doubles expected = doubles(sum);
  add(context(), a, b, b);
  EXPECT_EQ(doubles(b), expected);
}

// Rounding is to the nearest bfloat16, with ties to even. Sums are rounded once: 1 + 2^-8 + 2^-20 is above the tie, and
// 1 + 2^-8 is on it.
TEST_P(Elementwise, RoundsOnce) {
  const Tensor one = randoms({1, 2}), rest = random({1, 2}), sum = randoms({1, 2}), ones = random({1, 2});
  std::fill_n(ones.data<float>(), 2, 1.0f);
  convert(context(), ones, one);
  rest.data<float>()[0] = 0x1p-8f;
  rest.data<float>()[1] = 0x1p-8f + 0x1p-20f;
  add(context(), one, rest, sum);
  const bool wide = dtype() == DType::kFloat32;
  EXPECT_EQ(doubles(sum), (Doubles{wide ? 1.0 + 0x1p-8 : 1.0, wide ? 1.0 + 0x1p-8 + 0x1p-20 : 1.0 + 0x1p-7}));
}

TEST_P(Elementwise, ZeroesAndFindsWhatIsNotFinite) {
  const Tensor x = randoms({300, 777});
  EXPECT_TRUE(all_finite(context(), x));
  for (const float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    const Tensor last = x.rows(299, 300).columns(776, 777);
    const Tensor number = random({1, 1});
    number.data<float>()[0] = bad;
    convert(context(), number, last);
    EXPECT_FALSE(all_finite(context(), x));
    EXPECT_TRUE(all_finite(context(), x.columns(0, 776)));
  }
  set_zero(context(), x);
  EXPECT_EQ(doubles(x), Doubles(300 * 777, 0.0));
}

TESSERA_BOTH_TYPES(Elementwise);

}  // namespace
}  // namespace tessera
