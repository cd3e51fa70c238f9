// Grouped products of any type and size, without tensor cores: what the kernels for an architecture do not take, and
// the float32 mode. Slow, and simple.
#pragma once

#include "ops/runtime/context.h"

namespace tessera::cuda {

/// The products of ops/gemm/grouped_gemm.h. kWgradOfColumns multiplies d_yᵀ [M, R] and xᵀ [N, R].
enum class GroupedKind { kForward, kDgrad, kWgrad, kWgradOfColumns };

/// out (=; of weights' gradients also +=) the product; operands of one type, float32 or bfloat16, and out of that type,
/// for weights' gradients float32. Sums in float32, in the order of the contraction.
void grouped_simt(const Context& op, GroupedKind kind, const Tensor& x_or_dy, const Tensor& w_or_x,
                  const Tensor& offsets_E1, const Tensor& out, Write write);

}  // namespace tessera::cuda
