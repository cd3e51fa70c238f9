// The quantized form of a weight that has no copy in the type that layers compute in.
#pragma once

#include "ops/kit/gemm_operand.h"
#include "ops/runtime/context.h"

namespace tessera {

/// Quantizes a float32 weight w, [N, K] or [E, N, K], as rounded to `compute`, float32 or bfloat16. Results are those
/// of quantize_weight(). For bfloat16 it takes scratch memory for one matrix.
void quantize_master(const Context& context, const Tensor& w, DType compute, const mx::Format& format,
                     const QuantizedWeight& quantized);

}  // namespace tessera
