// Rotary position embedding (Su et al., arXiv 2104.09864) on adjacent pairs: (x[2i], x[2i+1]) is turned by the angle
// position · frequency[i]. The angles' cosines and sines come from a table (model/rope_table.h).
#pragma once

#include "ops/runtime/context.h"

namespace tessera {

enum class RopeDirection { kForward, kBackward };

/// Per head, turns the last `rope_dim` columns. x_TN: [T, num_heads · head_dim], strided, float32 or bfloat16.
/// y_TN: the same shape and type, strided: x itself (the other columns stay as they are), or another tensor, then
/// head_dim must be rope_dim. cos_PM, sin_PM: [positions, rope_dim / 2] float32; positions_T int32.
/// kBackward turns the other way, which is the gradient.
void rope(const Context& context, const Tensor& x_TN, std::int64_t num_heads, std::int64_t rope_dim,
          const Tensor& positions_T, const Tensor& cos_PM, const Tensor& sin_PM, RopeDirection direction,
          const Tensor& y_TN);

}  // namespace tessera
