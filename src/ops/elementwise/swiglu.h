// SwiGLU (Shazeer, arXiv 2002.05202): a = silu(gate) · up with silu(z) = z · sigmoid(z).
// h_R2F holds gate in its first F columns and up in its last F columns. All float tensors have one type. Arithmetic is
// in float32.
#pragma once

#include "ops/kit/gemm_operand.h"

namespace tessera {

// The quantized forms of an output are quantized from its numbers after they were rounded to h's type. If num_rows_1
// (int32, [1]) is given, only that many first rows are computed. The other rows are undefined.

/// Computes a_RF from h_R2F.
void swiglu_forward(const Context& context, const Tensor& h_R2F, const GemmOperand& a_RF,
                    const Tensor& num_rows_1 = {});

/// Computes d_h_R2F from d_a_RF. It also computes a_RF again, which the down projection's weight gradient needs. This
/// costs nothing here. It may work in place: d_h may be h, and a may be d_a.
void swiglu_backward(const Context& context, const Tensor& d_a_RF, const Tensor& h_R2F, const GemmOperand& d_h_R2F,
                     const GemmOperand& a_RF);

/// Computes the same for routed rows. An expert's output is w · W2 · a, with a weight w per row (weights_R, float32).
/// d_a_RF is the gradient of W2's input before the factor w.
///   d_weights_R (float32) = sum over F of d_a · a
///   d_h_R2F = gradient for w · d_a
///   weighted_a_RF = w · a
/// So W2's weight gradient is (unweighted d_y)ᵀ · weighted_a, and the expert's outputs need not be kept. Rows of weight
/// 0, such as padding, become 0 in d_h and weighted_a. It may work in place, as swiglu_backward does.
void swiglu_backward_weighted(const Context& context, const Tensor& d_a_RF, const Tensor& h_R2F,
                              const Tensor& weights_R, const Tensor& num_rows_1, const GemmOperand& d_h_R2F,
                              const GemmOperand& weighted_a_RF, const Tensor& d_weights_R);

}  // namespace tessera
