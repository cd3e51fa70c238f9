// Matrix products by cuBLASLt, for operators that consist of one product.
#pragma once

#include "ops/runtime/context.h"
#include "ops/runtime/gemm_key.h"

namespace tessera::cuda {

/// Holds the packed E8M0 scales (mx/scale_layout.h) of the operands' rows.
struct BlasScales {
  Tensor a, b;
};

/// Assigns or adds op(a) · op(b) to c_MN. The operands have one dtype. e4m3 operands come with their scales and need
/// Blackwell. They are a [M, K] and b [N, K], which is transposed. K is a multiple of 32. M and N are multiples of 16.
/// A batch has no scales.
void blas_gemm(const Context& op, const Tensor& a, bool transpose_a, const Tensor& b, bool transpose_b, const Tensor& c,
               Write write, const BlasScales& scales = {}, const GemmBatch& batch = {});

}  // namespace tessera::cuda
