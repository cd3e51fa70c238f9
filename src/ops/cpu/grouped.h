// Runs grouped GEMMs in parts. Operators that consist of grouped GEMMs use it.
#pragma once

#include "ops/runtime/context.h"

namespace tessera::cpu {

/// Names the products of routed rows and expert weights [num_experts, m, n]. Operands are those of
/// ops/gemm/grouped_gemm.h. kWgradOfColumns has transposed operands: d_y [m, num_rows] and x [n, num_rows].
enum class GroupedKind : std::uint8_t { kForward, kDgrad, kWgrad, kWgradOfColumns };

/// Assigns to `out` the product that `kind` names: of x and weights, d_y and weights, or d_y and x. A weight gradient
/// is added to `out` instead. offsets_E1 is that of ops/gemm/grouped_gemm.h. The caller must check the operands'
/// shapes.
void run_grouped_gemm(const Context& context, GroupedKind kind, const Tensor& x_or_dy, const Tensor& w_or_x,
                      const Tensor& offsets_E1, const Tensor& out);

}  // namespace tessera::cpu
