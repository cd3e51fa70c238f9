// RMSNorm (Zhang and Sennrich, arXiv 1910.07467): y = x · rstd · w, with rstd = (mean(x²) + eps)^-½ per row.
// Statistics are float32. x, y and w have one type, float32 or bfloat16.
#pragma once

#include "ops/kit/gemm_operand.h"

namespace tessera {

/// Computes y_TN and rstd_T (float32) from x_TN, which may be strided, and w_N. The quantized forms of y_TN are
/// quantized from y after it was rounded to the type of x.
void rmsnorm_forward(const Context& context, const Tensor& x_TN, const Tensor& w_N, float eps, const GemmOperand& y_TN,
                     const Tensor& rstd_T);

/// Computes a residual connection and the norm after it in one pass. First it assigns sum_TN = x_TN + delta_TN, rounded
/// to their type. Then it computes y_TN and rstd_T of sum_TN as rmsnorm_forward does.
void residual_rmsnorm_forward(const Context& context, const Tensor& x_TN, const Tensor& delta_TN, const Tensor& w_N,
                              float eps, const Tensor& sum_TN, const GemmOperand& y_TN, const Tensor& rstd_T);

/// Assigns or adds to d_x_TN the gradient that follows from d_y_TN. Adds to d_w_N (float32). x_TN and d_x_TN may be
/// strided. A GPU takes rows of up to 16384 numbers, or 9216 of float32, and otherwise throws InternalError.
void rmsnorm_backward(const Context& context, const Tensor& d_y_TN, const Tensor& x_TN, const Tensor& w_N,
                      const Tensor& rstd_T, const Tensor& d_x_TN, Write write_d_x, const Tensor& d_w_N);

}  // namespace tessera
