// Matrix products of quantized operands: of the numbers that elements and scales stand for, summed in float32. The
// counterparts of ops/gemm/gemm.h and ops/gemm/grouped_gemm.h, with the same write rules. y and d_x: float32 or
// bfloat16. The two operands of a product have scales of one type, and blocks along what it contracts.
//
// The CPU has no 8-bit floating-point products. MXFP8 operands are widened to bfloat16, which holds their numbers
// exactly (but for magnitudes below 2^-126, which count as 0); FP8 operands with float32 scales to float32, where
// element times scale is rounded once.
//
// Hopper's 8-bit tensor cores cannot apply a scale per 32 numbers: there the bfloat16 ones multiply such operands, y
// and d_x are bfloat16 and contiguous, and weights are wide.
#pragma once

#include "ops/kit/gemm_operand.h"

namespace tessera {

/// The form of a weight [.., M, N] in which this target's products of activations and results of type `dtype` read it.
WeightForm weight_form(const Context& context, const Shape& shape, const mx::Format& format, DType dtype);

/// y_TM (= or +=) x_TN · w_MNᵀ.
void linear_forward(const Context& context, const mx::Quantized& x_TN, const QuantizedWeight& w_MN, const Tensor& y_TM,
                    Write write = Write::kAssign);

/// d_x_TN (= or +=) d_y_TM · w_MN.
void linear_dgrad(const Context& context, const mx::Quantized& d_y_TM, const QuantizedWeight& w_MN,
                  const Tensor& d_x_TN, Write write = Write::kAssign);

/// d_w_MN (+= or =) d_yᵀ · x, from both operands' columns; d_w is float32.
void linear_wgrad(const Context& context, const mx::Quantized& d_y_MT, const mx::Quantized& x_NT, const Tensor& d_w_MN,
                  Write write = Write::kAccumulate);

// Rows [offsets[e], offsets[e + 1]) belong to expert e. For the weight gradient all offsets are multiples of the
// format's block, the groups being padded with rows of zeros.

/// y_RM = x_RN · w_eᵀ.
void grouped_linear_forward(const Context& context, const mx::Quantized& x_RN, const QuantizedWeight& w_EMN,
                            const Tensor& offsets_E1, const Tensor& y_RM);

/// d_x_RN = d_y_RM · w_e.
void grouped_linear_dgrad(const Context& context, const mx::Quantized& d_y_RM, const QuantizedWeight& w_EMN,
                          const Tensor& offsets_E1, const Tensor& d_x_RN);

/// d_w_EMN[e] (+= or =) d_yᵀ · x over expert e's rows, from both operands' columns; d_w is float32.
void grouped_linear_wgrad(const Context& context, const mx::Quantized& d_y_MR, const mx::Quantized& x_NR,
                          const Tensor& offsets_E1, const Tensor& d_w_EMN, Write write = Write::kAccumulate);

}  // namespace tessera
