#include "ops/elementwise/init.h"

#include <gtest/gtest.h>

#include "tests/ops/harness.h"

namespace tessera {
namespace {

using Initial = OperatorTest;

TEST_F(Initial, PartsAreThoseOfTheWhole) {
  const Philox random(7, stream_of("w"));
  const InitPattern pattern{.first = {.std = 0.02f, .bound = 0.03f}, .second = {.std = 3.0f}, .run = 100};
  const Tensor whole = arena_.allocate({1000}, DType::kFloat32), part = arena_.allocate({333}, DType::kFloat32);
  draw_initial(context(), random, pattern, 0, whole);
  draw_initial(context(), random, pattern, 250, part);
  for (std::int64_t i = 0; i < 333; ++i) EXPECT_EQ(part.data<float>()[i], whole.data<float>()[250 + i]) << i;
}

TEST_F(Initial, HasTheDeviationsOfItsRuns) {
  const std::int64_t run = 20000;
  const Tensor x = arena_.allocate({3 * run}, DType::kFloat32);
  draw_initial(context(), Philox(1, 2), {.first = {.std = 2.0f}, .second = {.std = 1.0f, .bound = 1.0f}, .run = run}, 0,
               x);
  const auto deviation = [&](std::int64_t begin) {
    double sum = 0.0;
    for (std::int64_t i = begin; i < begin + run; ++i) {
      sum += static_cast<double>(x.data<float>()[i]) * static_cast<double>(x.data<float>()[i]);
    }
    return std::sqrt(sum / static_cast<double>(run));
  };
  EXPECT_NEAR(deviation(0), 2.0, 0.05);
  EXPECT_NEAR(deviation(2 * run), 2.0, 0.05);
  EXPECT_NEAR(deviation(run), 0.5396, 0.02);  // sqrt(1 - 2·φ(1) / (2·Φ(1) - 1))
  for (std::int64_t i = run; i < 2 * run; ++i) ASSERT_LE(std::abs(x.data<float>()[i]), 1.0f);
}

TEST_F(Initial, WithoutADeviationAreOnes) {
  const Tensor x = arena_.allocate({5}, DType::kFloat32);
  draw_initial(context(), Philox(1, 2), {}, 3, x);
  for (std::int64_t i = 0; i < 5; ++i) EXPECT_EQ(x.data<float>()[i], 1.0f);
}

}  // namespace
}  // namespace tessera
