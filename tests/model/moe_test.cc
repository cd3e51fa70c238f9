#include "model/moe.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

// delta = coeff · sign(mean - count), less its own mean.
TEST(Moe, ExpertBiasUpdate) {
  ModelConfig config;
  config.num_experts = 4;
  Parameters parameters;
  const Moe moe(parameters, config, false, "layers.1.moe.", 1);
  parameters.allocate(DType::kFloat32);
  const float* bias = parameters.buffer(moe.expert_bias()).data<float>();
  moe.update_expert_bias(parameters, {10, 2, 4, 0}, 0.001f);  // mean 4: signs -, +, 0, +; their mean 0.25
  EXPECT_FLOAT_EQ(bias[0], -0.00125f);
  EXPECT_FLOAT_EQ(bias[1], 0.00075f);
  EXPECT_FLOAT_EQ(bias[2], -0.00025f);
  EXPECT_FLOAT_EQ(bias[3], 0.00075f);
  moe.update_expert_bias(parameters, {4, 4, 4, 4}, 0.001f);
  EXPECT_FLOAT_EQ(bias[0], -0.00125f);
}

}  // namespace
}  // namespace tessera
