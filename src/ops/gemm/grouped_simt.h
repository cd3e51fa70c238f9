// Grouped products of any type and size, without tensor cores. They are used for float32, and for operands that the
// kernels of an architecture do not accept. They are slow and simple.
#pragma once

#include "ops/runtime/context.h"

namespace tessera::cuda {

/// Names the products of ops/gemm/grouped_gemm.h. kWgradOfColumns multiplies d_yᵀ [M, R] and xᵀ [N, R].
enum class GroupedKind { kForward, kDgrad, kWgrad, kWgradOfColumns };

/// Assigns the product to `out`. A weight gradient may also be added to it. Operands have one type, float32 or
/// bfloat16. `out` has the same type, but is float32 for weight gradients. Sums are in float32, in the order of the
/// contraction.
void grouped_simt(const Context& op, GroupedKind kind, const Tensor& x_or_dy, const Tensor& w_or_x,
                  const Tensor& offsets_E1, const Tensor& out, Write write);

}  // namespace tessera::cuda
