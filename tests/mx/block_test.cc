#include "mx/block.h"

#include <gtest/gtest.h>

#include <limits>

namespace tessera::mx {
namespace {

struct Cast {
  std::uint8_t scale, element;
  bool operator==(const Cast&) const = default;
};

Cast cast_alone(float x, ScalingMode mode) {
  Cast cast{};
  cast.scale = quantize_block(&x, 1, mode, &cast.element);
  return cast;
}

TEST(Block, ScalesOfSingleNumbers) {
  constexpr float kMax = std::numeric_limits<float>::max();
  EXPECT_EQ(cast_alone(448.0f, ScalingMode::kRceil), (Cast{127, 0x7E}));
  EXPECT_EQ(cast_alone(448.0f, ScalingMode::kFloor), (Cast{127, 0x7E}));
  EXPECT_EQ(cast_alone(480.0f, ScalingMode::kFloor), (Cast{127, 0x7E}));
  EXPECT_EQ(cast_alone(480.0f, ScalingMode::kRceil), (Cast{128, 0x77}));
  EXPECT_EQ(cast_alone(kMax, ScalingMode::kFloor), (Cast{246, 0x7E}));
  EXPECT_EQ(cast_alone(kMax, ScalingMode::kRceil), (Cast{247, 0x78}));
  EXPECT_EQ(cast_alone(0x1p-126f, ScalingMode::kRceil), (Cast{0, 0x40}));
  EXPECT_EQ(cast_alone(0x1p-126f, ScalingMode::kFloor), (Cast{0, 0x40}));
  EXPECT_EQ(cast_alone(0.0f, ScalingMode::kRceil), (Cast{0, 0}));
}

}  // namespace
}  // namespace tessera::mx
