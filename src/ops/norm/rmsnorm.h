// RMSNorm (Zhang and Sennrich, arXiv 1910.07467): y = x · rstd · w, rstd = (mean(x²) + eps)^-½ per row.
// Statistics in float32. x, y and w have one type, float32 or bfloat16.
#pragma once

#include "ops/kit/gemm_operand.h"

namespace tessera {

/// y_TN, rstd_T (float32) from x_TN (strided) and w_N. What y_TN holds in quantized form is quantized from y rounded to
/// the type of x.
void rmsnorm_forward(const Context& context, const Tensor& x_TN, const Tensor& w_N, float eps, const GemmOperand& y_TN,
                     const Tensor& rstd_T);

/// The residual connection and the norm behind it in one pass: sum_TN = x_TN + delta_TN (rounded to its type first),
/// then y_TN and rstd_T of sum_TN as above.
void residual_rmsnorm_forward(const Context& context, const Tensor& x_TN, const Tensor& delta_TN, const Tensor& w_N,
                              float eps, const Tensor& sum_TN, const GemmOperand& y_TN, const Tensor& rstd_T);

/// d_x_TN (= or +=, strided) from d_y_TN; d_w_N += (float32). x_TN is strided.
void rmsnorm_backward(const Context& context, const Tensor& d_y_TN, const Tensor& x_TN, const Tensor& w_N,
                      const Tensor& rstd_T, const Tensor& d_x_TN, Write write_d_x, const Tensor& d_w_N);

}  // namespace tessera
