// Matrix products of routed rows with their experts' weights. The numbers of rows are data, which is read when the
// operator runs.
//
// Rows [offsets[e], offsets[e + 1]) belong to expert e. Any skew is allowed, and experts may be empty. Rows from
// offsets[E] on are neither read nor written. x, y and w have one type, float32 or bfloat16. Sums are in float32.
#pragma once

#include "ops/runtime/context.h"

namespace tessera {

/// Computes y_RM = x_RN · w_eᵀ, where w_EMN[e] is [out, in].
void grouped_linear_forward(const Context& context, const Tensor& x_RN, const Tensor& w_EMN, const Tensor& offsets_E1,
                            const Tensor& y_RM);

/// Computes d_x_RN = d_y_RM · w_e.
void grouped_linear_dgrad(const Context& context, const Tensor& d_y_RM, const Tensor& w_EMN, const Tensor& offsets_E1,
                          const Tensor& d_x_RN);

/// Adds or assigns d_yᵀ · x over expert e's rows to d_w_EMN[e], which is float32. kAssign sets it to 0 for an expert
/// without rows.
void grouped_linear_wgrad(const Context& context, const Tensor& d_y_RM, const Tensor& x_RN, const Tensor& offsets_E1,
                          const Tensor& d_w_EMN, Write write = Write::kAccumulate);

}  // namespace tessera
