#include "ops/routing/expert_bias.h"

#include "tests/ops/harness.h"

namespace tessera {
namespace {

using ExpertBias = OperatorTest;

// The update is delta = coeff · sign(mean - count), less its own mean.
TEST_F(ExpertBias, MovesAgainstTheLoad) {
  const Tensor finite = random({1}), bias = random({4}, DType::kFloat32, 0.0),
               counts = arena_.allocate({4}, DType::kFloat64);
  const auto update = [&](const Doubles& loads) {
    std::copy(loads.begin(), loads.end(), counts.data<double>());
    update_expert_bias(context(), counts, 0.001f, finite, bias);
    return doubles(bias);
  };
  // The mean is 4: signs -, +, 0, +; their mean is 0.25.
  const Doubles expected = {-0.00125, 0.00075, -0.00025, 0.00075};
  EXPECT_LE(relative_error(update({10, 2, 4, 0}), expected), kForwardBound);
  EXPECT_LE(relative_error(update({4, 4, 4, 4}), expected), kForwardBound);
  finite.data<float>()[0] = 0.0f;
  EXPECT_LE(relative_error(update({10, 2, 4, 0}), expected), kForwardBound);
}

}  // namespace
}  // namespace tessera
