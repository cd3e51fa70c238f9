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

// A GPU rounds the product before it adds it. So must the CPU, whose compiler would fuse both into one instruction.
TEST_F(ExpertBias, RoundsTheChangeBeforeItIsAdded) {
  constexpr std::int64_t kExperts = 512;
  constexpr float kCoeff = 0.001f;
  const Tensor finite = random({1}), bias = random({kExperts}, DType::kFloat32, 0.05),
               counts = arena_.allocate({kExperts}, DType::kFloat64);
  const std::vector<float> before(bias.data<float>(), bias.data<float>() + kExperts);
  // A third of the experts has too much, and the others too little.
  float mean_sign = 0.0f;
  for (std::int64_t e = 0; e < kExperts; ++e) {
    counts.data<double>()[e] = e % 3 == 0 ? 9.0 : 1.0;
    mean_sign += (e % 3 == 0 ? -1.0f : 1.0f) / kExperts;
  }
  update_expert_bias(context(), counts, kCoeff, finite, bias);
  for (std::int64_t e = 0; e < kExperts; ++e) {
    const volatile float change = kCoeff * ((e % 3 == 0 ? -1.0f : 1.0f) - mean_sign);
    EXPECT_EQ(bias.data<float>()[e], before[static_cast<std::size_t>(e)] + change) << e;
  }
}

}  // namespace
}  // namespace tessera
