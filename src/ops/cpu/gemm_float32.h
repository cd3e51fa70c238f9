// A product of float32 operands into an output of either type; for operators that widen what the library cannot
// multiply.
#pragma once

#include "ops/context.h"

namespace tessera::cpu {

/// As gemm (ops/gemm.h) of float32 a and b, but c may be bfloat16 too: rounded once, += included.
void gemm_float32(const Context& context, const Tensor& a, bool transpose_a, const Tensor& b, bool transpose_b,
                  const Tensor& c, Write write);

}  // namespace tessera::cpu
