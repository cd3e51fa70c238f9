#include "ops/elementwise.h"

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
