// SwiGLU (Shazeer, arXiv 2002.05202): a = silu(gate) · up, silu(z) = z · sigmoid(z).
// h_R2F holds gate in its first F columns and up in its last F. One float type throughout; arithmetic in float32.
#pragma once

#include "ops/kit/gemm_operand.h"

namespace tessera {

// What an output holds in quantized form is quantized from its numbers rounded to h's type.
// num_rows_1 (int32, [1]), where given: only that many first rows are computed, the rest is undefined.

/// a_RF from h_R2F.
void swiglu_forward(const Context& context, const Tensor& h_R2F, const GemmOperand& a_RF,
                    const Tensor& num_rows_1 = {});

/// d_h_R2F from d_a_RF, and a_RF once more (the down projection's weight gradient needs it, and it costs nothing here).
/// d_h may be h, and a may be d_a: in place.
void swiglu_backward(const Context& context, const Tensor& d_a_RF, const Tensor& h_R2F, const GemmOperand& d_h_R2F,
                     const GemmOperand& a_RF);

/// The same for routed rows, where an expert's output is w · W2 · a with a weight w per row (weights_R, float32):
/// d_a_RF is the gradient of W2's input before the factor w.
///   d_weights_R (float32) = sum over F of d_a · a,  d_h_R2F = gradient for w · d_a,  weighted_a_RF = w · a,
/// so that W2's weight gradient is (unweighted d_y)ᵀ · weighted_a, and the expert's outputs need not be kept. Rows of
/// weight 0, which padding has, become 0. In place as above.
void swiglu_backward_weighted(const Context& context, const Tensor& d_a_RF, const Tensor& h_R2F,
                              const Tensor& weights_R, const Tensor& num_rows_1, const GemmOperand& d_h_R2F,
                              const GemmOperand& weighted_a_RF, const Tensor& d_weights_R);

}  // namespace tessera
