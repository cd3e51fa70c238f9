// Matrix products of routed rows with their experts' weights. Row counts are data, read when the operator runs.
//
// Rows [offsets[e], offsets[e + 1]) belong to expert e; any skew, empty experts too. Rows at and beyond offsets[E] are
// neither read nor written. x, y and w have one type, float32 or bfloat16; sums in float32.
#pragma once

#include "ops/runtime/context.h"

namespace tessera {

/// y_RM = x_RN · w_eᵀ, w_EMN[e] being [out, in].
void grouped_linear_forward(const Context& context, const Tensor& x_RN, const Tensor& w_EMN, const Tensor& offsets_E1,
                            const Tensor& y_RM);

/// d_x_RN = d_y_RM · w_e.
void grouped_linear_dgrad(const Context& context, const Tensor& d_y_RM, const Tensor& w_EMN, const Tensor& offsets_E1,
                          const Tensor& d_x_RN);

/// d_w_EMN[e] (+= or =) d_yᵀ · x over expert e's rows; d_w is float32. Assigned, that of an expert without rows is 0.
void grouped_linear_wgrad(const Context& context, const Tensor& d_y_RM, const Tensor& x_RN, const Tensor& offsets_E1,
                          const Tensor& d_w_EMN, Write write = Write::kAccumulate);

}  // namespace tessera
