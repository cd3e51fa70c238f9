// Dense matrix products, accumulated in float32.
#pragma once

#include "ops/runtime/context.h"

namespace tessera {

/// c_MN (= or +=) op(a) · op(b), where op transposes if asked to. a, b: float32 or bfloat16, strided; c: float32, or
/// bfloat16 if b is, strided. Sums in float32; into a bfloat16 c, += rounds once. A float32 a counts in full when b is
/// bfloat16.
void gemm(const Context& context, const Tensor& a, bool transpose_a, const Tensor& b, bool transpose_b, const Tensor& c,
          Write write);

/// y_TM (= or +=) x_TN · w_MNᵀ: a linear layer whose weight is [out, in].
inline void linear_forward(const Context& context, const Tensor& x_TN, const Tensor& w_MN, const Tensor& y_TM,
                           Write write = Write::kAssign) {
  gemm(context, x_TN, false, w_MN, true, y_TM, write);
}

/// d_x_TN (= or +=) d_y_TM · w_MN.
inline void linear_dgrad(const Context& context, const Tensor& d_y_TM, const Tensor& w_MN, const Tensor& d_x_TN,
                         Write write = Write::kAssign) {
  gemm(context, d_y_TM, false, w_MN, false, d_x_TN, write);
}

/// d_w_MN (+= or =) d_y_TMᵀ · x_TN; d_w is float32.
inline void linear_wgrad(const Context& context, const Tensor& d_y_TM, const Tensor& x_TN, const Tensor& d_w_MN,
                         Write write = Write::kAccumulate) {
  gemm(context, d_y_TM, true, x_TN, false, d_w_MN, write);
}

}  // namespace tessera
