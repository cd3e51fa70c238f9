// The limits of float and the ways to round a scale that the tests of this folder share.
#pragma once

#include <array>
#include <limits>

#include "mx/block.h"

namespace tessera::mx {

inline constexpr float kMax = std::numeric_limits<float>::max();
inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

inline constexpr std::array kModes = {ScalingMode::kFloor, ScalingMode::kRceil, ScalingMode::kCeil, ScalingMode::kEven};

}  // namespace tessera::mx
