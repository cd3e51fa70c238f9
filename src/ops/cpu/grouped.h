// Runs the grouped GEMM's parts; for the operators that are made of it.
#pragma once

#include "ops/runtime/context.h"

namespace tessera::cpu {

/// Multiplies routed rows and expert weights [num_experts, m, n]; operands as in ops/gemm/grouped_gemm.h.
/// kWgradOfColumns: the operands are transposed, d_y [m, num_rows] and x [n, num_rows].
enum class GroupedKind : std::uint8_t { kForward, kDgrad, kWgrad, kWgradOfColumns };

/// out (of a weight gradient: +=) the product that `kind` says: of x and weights, d_y and weights, or d_y and x.
/// offsets_E1 as in ops/gemm/grouped_gemm.h. The operands' shapes are the caller's to check.
void run_grouped_gemm(const Context& context, GroupedKind kind, const Tensor& x_or_dy, const Tensor& w_or_x,
                      const Tensor& offsets_E1, const Tensor& out);

}  // namespace tessera::cpu
