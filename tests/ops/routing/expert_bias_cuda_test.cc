#include "ops/routing/expert_bias.h"
#include "tests/ops/parity.h"

namespace tessera {
namespace {

using ExpertBiasCuda = ParityTest;

TEST_F(ExpertBiasCuda, Updates) {
  for (const std::int64_t experts : {1, 3, 64, 256, 300}) {
    const Tensor finite = random({1}), bias = random({experts}), counts = arena_.allocate({experts}, DType::kFloat64);
    for (std::int64_t e = 0; e < experts; ++e) counts.data<double>()[e] = static_cast<double>(e * 7 % 12);
    const Doubles before = doubles(bias);
    const auto update = [&](const Side& side) {
      update_expert_bias(side.op, side(counts), 1e-3f, side(finite), side(bias));
    };
    finite.data<float>()[0] = 0.0f;
    expect_same(update, {bias});
    EXPECT_EQ(doubles(bias), before);
    finite.data<float>()[0] = 1.0f;
    expect_same(update, {bias});
    if (experts > 1) {
      EXPECT_NE(doubles(bias), before);
    }
  }
}

}  // namespace
}  // namespace tessera
