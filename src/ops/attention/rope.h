// Rotary position embedding (Su et al., arXiv 2104.09864). It rotates each pair (x[2i], x[2i+1]) of adjacent columns by
// the angle position · frequency[i]. A table holds the cosines and sines of the angles (model/rope_table.h).
#pragma once

#include "ops/runtime/context.h"

namespace tessera {

enum class RopeDirection { kForward, kBackward };

/// Rotates the last `rope_dim` columns of each head. kBackward rotates in the opposite direction, which gives the
/// gradient.
/// - x_TN: [T, num_heads · head_dim], strided, float32 or bfloat16.
/// - y_TN: the same shape and type, strided. It may be x itself, and then the other columns keep their values. If it is
///   another tensor, head_dim must equal rope_dim.
/// - cos_PM and sin_PM: [positions, rope_dim / 2], float32.
/// - positions_T: int32.
/// A CPU takes a rope_dim of up to 1024, and otherwise throws Error.
void rope(const Context& context, const Tensor& x_TN, std::int64_t num_heads, std::int64_t rope_dim,
          const Tensor& positions_T, const Tensor& cos_PM, const Tensor& sin_PM, RopeDirection direction,
          const Tensor& y_TN);

}  // namespace tessera
