// Matrix products of quantized operands. They multiply the numbers that elements and scales stand for, and sum in
// float32. They are the counterparts of ops/gemm/gemm.h and ops/gemm/grouped_gemm.h, with the same write rules. y and
// d_x are float32 or bfloat16. The two operands of a product have scales of one type. Their blocks lie along the dim
// that the product contracts.
//
// The CPU has no 8-bit floating-point products. It widens MXFP8 operands to bfloat16, which holds their numbers
// exactly. Magnitudes below 2^-126 are the exception: AVX512_BF16's instructions take them as 0. It widens FP8 operands
// with float32 scales to float32, and rounds element times scale once.
//
// Hopper's 8-bit tensor cores cannot apply a scale per 32 numbers. The bfloat16 tensor cores multiply such operands,
// and weights are in the wide form. y and d_x are then bfloat16 and contiguous. Where Hopper adds to them, it
// rounds the product to bfloat16 first. gemm.h rounds only the sum.
#pragma once

#include "ops/kit/gemm_operand.h"

namespace tessera {

/// Returns the form in which this target's products read a weight [.., M, N]. `dtype` is the type of the products'
/// activations and results.
WeightForm weight_form(const Context& context, const Shape& shape, const mx::Format& format, DType dtype);

/// Assigns or adds x_TN · w_MNᵀ to y_TM.
void linear_forward(const Context& context, const mx::Quantized& x_TN, const QuantizedWeight& w_MN, const Tensor& y_TM,
                    Write write = Write::kAssign);

/// Assigns or adds d_y_TM · w_MN to d_x_TN.
void linear_dgrad(const Context& context, const mx::Quantized& d_y_TM, const QuantizedWeight& w_MN,
                  const Tensor& d_x_TN, Write write = Write::kAssign);

/// Adds or assigns d_yᵀ · x to d_w_MN, which is float32. It reads the columns of both operands.
void linear_wgrad(const Context& context, const mx::Quantized& d_y_MT, const mx::Quantized& x_NT, const Tensor& d_w_MN,
                  Write write = Write::kAccumulate);

// Rows [offsets[e], offsets[e + 1]) belong to expert e. For the weight gradient, all offsets must be multiples of the
// format's block. So groups are padded with rows of zeros. For other offsets a CPU throws InternalError. A GPU does not
// check them.

/// Computes y_RM = x_RN · w_eᵀ.
void grouped_linear_forward(const Context& context, const mx::Quantized& x_RN, const QuantizedWeight& w_EMN,
                            const Tensor& offsets_E1, const Tensor& y_RM);

/// Computes d_x_RN = d_y_RM · w_e.
void grouped_linear_dgrad(const Context& context, const mx::Quantized& d_y_RM, const QuantizedWeight& w_EMN,
                          const Tensor& offsets_E1, const Tensor& d_x_RN);

/// Adds or assigns d_yᵀ · x over expert e's rows to d_w_EMN[e], which is float32. It reads the columns of both
/// operands.
void grouped_linear_wgrad(const Context& context, const mx::Quantized& d_y_MR, const mx::Quantized& x_NR,
                          const Tensor& offsets_E1, const Tensor& d_w_EMN, Write write = Write::kAccumulate);

}  // namespace tessera
