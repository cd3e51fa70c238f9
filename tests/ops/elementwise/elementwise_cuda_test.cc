#include "ops/elementwise/elementwise.h"
#include "tests/ops/parity.h"

namespace tessera {
namespace {

using ElementwiseCuda = ParityTest;

TEST_F(ElementwiseCuda, Convert) {
  for (const DType from : kActivationTypes) {
    for (const DType to : kActivationTypes) {
      // The shapes are one number, rows that are no multiple of the lanes, many rows, and one long row with a tail.
      for (const Shape& shape : {Shape{1}, {3, 7}, {70000, 8}, {1, 100003}}) {
        const Tensor x = random(shape, from, 3.0), y = poisoned(shape, to);
        expect_same([&](const Side& side) { convert(side.op, side(x), side(y)); }, {y});
      }
      // These are columns of wider matrices, whose rows are aligned in one case and not in the other.
      for (const std::int64_t width : {48, 45}) {
        const Tensor x = random({33, width}, from).columns(8, 40), y = poisoned({33, width}, to).columns(0, 32);
        expect_same([&](const Side& side) { convert(side.op, side(x), side(y)); }, {y});
      }
    }
  }
}

TEST_F(ElementwiseCuda, Add) {
  for (const auto& [a_type, b_type] : {std::pair{kActivationTypes[0], kActivationTypes[0]},
                                       {kActivationTypes[1], kActivationTypes[1]},
                                       {kActivationTypes[1], kActivationTypes[0]}}) {
    for (const Shape& shape : {Shape{1}, {129, 64}, {7, 1001}}) {
      const Tensor a = random(shape, a_type), b = random(shape, b_type), sum = poisoned(shape, a_type);
      expect_same([&](const Side& side) { add(side.op, side(a), side(b), side(sum)); }, {sum});
      const Tensor c = random(shape, a_type), sum3 = poisoned(shape, a_type);
      expect_same([&](const Side& side) { add(side.op, side(a), side(b), side(sum3), side(c)); }, {sum3});
      expect_same([&](const Side& side) { add(side.op, side(a), side(b), side(a)); }, {a});
    }
  }
}

TEST_F(ElementwiseCuda, Sums) {
  for (const std::int64_t size : {1, 1000, 16384, 70001}) {
    const Tensor x = random({size}), sum = arena_.allocate({1}, DType::kFloat64);
    sum.data<double>()[0] = 3.5;
    expect_close([&](const Side& side) { add_sum(side.op, side(x), side(sum)); }, {sum}, 1e-12);
  }
  const Tensor counts = ints({5, 0, 1 << 30}), sums = arena_.allocate({3}, DType::kFloat64);
  for (std::int64_t i = 0; i < 3; ++i) sums.data<double>()[i] = 1e10;
  expect_same([&](const Side& side) { add_counts(side.op, side(counts), side(sums)); }, {sums});
}

TEST_F(ElementwiseCuda, CopyAndZero) {
  const Tensor x = random({5, 1001}, DType::kBFloat16), y = poisoned({5, 1001}, DType::kBFloat16);
  expect_same([&](const Side& side) { copy(side.op, side(x), side(y)); }, {y});
  // Each thread has several words in flight. Byte by byte it has several times as many.
  for (const auto& [shape, dtype] :
       {std::pair{Shape{1 << 18, 21}, DType::kFloat32}, {Shape{(1 << 20) + 1, 3}, DType::kBFloat16}}) {
    const ArenaScope scope(arena_);
    const Tensor long_x = random(shape, dtype), long_y = poisoned(shape, dtype);
    expect_same([&](const Side& side) { copy(side.op, side(long_x), side(long_y)); }, {long_y});
  }
  expect_same([&](const Side& side) { set_zero(side.op, side(y)); }, {y});
}

TEST_F(ElementwiseCuda, AllFinite) {
  for (const float bad : {1.0f, HUGE_VALF, -HUGE_VALF, NAN}) {
    const Tensor x = random({70, 129}).columns(1, 128);
    x.data<float>()[69 * x.stride() + 126] = bad;
    expect_same([&](const Side& side) { EXPECT_EQ(all_finite(side.op, side(x)), bad == 1.0f); }, {});
  }
}

}  // namespace
}  // namespace tessera
