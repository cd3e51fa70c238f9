// cuBLASLt's products, for the operators that are made of one.
#pragma once

#include "ops/runtime/context.h"

namespace tessera::cuda {

/// Packed E8M0 scales (mx/scale_layout.h) of the operands' rows.
struct BlasScales {
  Tensor a, b;
};

/// c_MN (= or +=) op(a) · op(b), of operands of one dtype. Of e4m3 with their scales: on Blackwell, a [M, K] times b
/// [N, K]ᵀ, K a multiple of 32, M and N of 16.
void blas_gemm(const Context& op, const Tensor& a, bool transpose_a, const Tensor& b, bool transpose_b, const Tensor& c,
               Write write, const BlasScales& scales = {});

}  // namespace tessera::cuda
