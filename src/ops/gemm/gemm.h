// Dense matrix products with float32 accumulation. If the context says that weights are constant, b must be a weight.
#pragma once

#include <array>

#include "ops/runtime/context.h"
#include "ops/runtime/gemm_key.h"

namespace tessera {

/// Assigns or adds op(a) · op(b) to c_MN, where op transposes if asked to. a and b are float32 or bfloat16, and
/// strided. c is float32, or bfloat16 if b is, and strided. Sums are in float32. When adding to a bfloat16 c, it rounds
/// once. If a is float32 and b is bfloat16, a keeps its full precision.
void gemm(const Context& context, const Tensor& a, bool transpose_a, const Tensor& b, bool transpose_b, const Tensor& c,
          Write write);

/// Assigns a · op(b) to c_MN, for each product of the batch. The tensors are those of the first product. They have one
/// type, float32 or bfloat16, and may be strided.
void batched_gemm(const Context& context, const Tensor& a, const Tensor& b, bool transpose_b, const Tensor& c,
                  const GemmBatch& batch);

/// Assigns or adds x_TN · w_MNᵀ to y_TM. This is a linear layer whose weight is [out, in].
inline void linear_forward(const Context& context, const Tensor& x_TN, const Tensor& w_MN, const Tensor& y_TM,
                           Write write = Write::kAssign) {
  gemm(context, x_TN, false, w_MN, true, y_TM, write);
}

/// Assigns x_TN · w_MNᵀ to an output [T, M] for two weights. All tensors have one type. A GPU computes both at once if
/// there are few rows.
void linear_pair_forward(const Context& context, const Tensor& x_TN, const std::array<Tensor, 2>& weights,
                         const std::array<Tensor, 2>& outputs);

/// Assigns or adds d_y_TM · w_MN to d_x_TN.
inline void linear_dgrad(const Context& context, const Tensor& d_y_TM, const Tensor& w_MN, const Tensor& d_x_TN,
                         Write write = Write::kAssign) {
  gemm(context, d_y_TM, false, w_MN, false, d_x_TN, write);
}

/// Adds or assigns d_y_TMᵀ · x_TN to d_w_MN, which is float32.
inline void linear_wgrad(const Context& context, const Tensor& d_y_TM, const Tensor& x_TN, const Tensor& d_w_MN,
                         Write write = Write::kAccumulate) {
  gemm(context, d_y_TM, true, x_TN, false, d_w_MN, write);
}

}  // namespace tessera
