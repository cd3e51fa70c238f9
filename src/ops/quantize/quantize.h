// Block quantization (mx/): from float32 or bfloat16 to 8-bit elements with scales, and back. Exactly mx/block.h's
// definition, byte for byte, whatever the processor.
//
// x is [M, K], strided, or a contiguous stack [E, M, K] of such. Two outputs, either of which may be undefined:
//   rows     [M, K]: blocks along K, for a GEMM that contracts K.
//   columns  [K, M]: x transposed, blocks along M, for a GEMM that contracts M.
// Both have one format. x is read once for both.
#pragma once

#include "ops/kit/gemm_operand.h"
#include "ops/runtime/context.h"

namespace tessera {

/// rows (=), columns (=) from x.
void quantize(const Context& context, const Tensor& x, const mx::Quantized& rows, const mx::Quantized& columns);

/// The forms of `quantized` that are defined (=), from w [.., N, K], all with blocks of `format`.
void quantize_weight(const Context& context, const Tensor& w, const mx::Format& format,
                     const QuantizedWeight& quantized);

/// y (=) the numbers that x stands for; y [..., M, K], float32 or bfloat16, contiguous, of the elements' shape. Exact
/// in bfloat16 for E8M0 scales, as far as a number is in bfloat16's range.
void dequantize(const Context& context, const mx::Quantized& x, const Tensor& y);

/// Sums over numbers: of squares, and of squared differences.
struct ErrorSums {
  double signal = 0.0, noise = 0.0;

  ErrorSums& operator+=(const ErrorSums& other) {
    signal += other.signal, noise += other.noise;
    return *this;
  }
  /// Signal-to-quantization-noise ratio in dB; infinity without noise.
  double sqnr_db() const;
};

/// sums_2 (float64, +=): ErrorSums' signal and noise, of how far q is from x, of the same shape. num_rows_1 (int32,
/// [1]), where given: of that many first rows only; x is a matrix then.
void quantization_error(const Context& context, const Tensor& x, const mx::Quantized& q, const Tensor& sums_2,
                        const Tensor& num_rows_1 = {});

}  // namespace tessera
