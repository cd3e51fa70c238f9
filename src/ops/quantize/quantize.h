// Block quantization (mx/). It converts float32 or bfloat16 to 8-bit elements with scales, and back. On every
// processor, the results equal the definition of mx/block.h byte for byte.
//
// x is [M, K], strided, or a contiguous stack [E, M, K] of matrices. There are two outputs, and either may be
// undefined:
//   rows     [M, K]: has blocks along K, for a GEMM that contracts K.
//   columns  [K, M]: is x transposed with blocks along M, for a GEMM that contracts M.
// Each has a format of its own. x is read once for both.
#pragma once

#include "ops/kit/gemm_operand.h"
#include "ops/runtime/context.h"

namespace tessera {

/// Assigns `rows` and `columns` from x.
void quantize(const Context& context, const Tensor& x, const mx::Quantized& rows, const mx::Quantized& columns);

/// Assigns the defined forms of `quantized` from w [.., N, K]. All of them have blocks of `format`.
void quantize_weight(const Context& context, const Tensor& w, const mx::Format& format,
                     const QuantizedWeight& quantized);

/// Assigns to y the numbers that x stands for. y is [..., M, K], float32 or bfloat16, contiguous, and has the elements'
/// shape. With E8M0 scales, a bfloat16 y is exact for all numbers in bfloat16's range.
void dequantize(const Context& context, const mx::Quantized& x, const Tensor& y);

/// Returns the type whose products of x are exact: bfloat16 with E8M0 scales, and float32 with others.
DType wide_type(const mx::Quantized& x);
/// Returns x dequantized to this type, in scratch memory.
Tensor widened(const Context& context, const mx::Quantized& x, DType dtype);

/// Holds two sums over numbers: that of squares, and that of squared differences.
struct ErrorSums {
  double signal = 0.0, noise = 0.0;

  ErrorSums& operator+=(const ErrorSums& other) {
    signal += other.signal, noise += other.noise;
    return *this;
  }
  /// Returns the signal-to-quantization-noise ratio in dB. It is infinite if there is no noise.
  double sqnr_db() const;
};

/// Adds the signal of x and the noise of q to sums_2 (float64), in the order of ErrorSums. q has the shape of x. Noise
/// is the difference between q and x. x has at least one column. If num_rows_1 (int32, [1]) is given, only that many
/// first rows count, and x must be a matrix.
void quantization_error(const Context& context, const Tensor& x, const mx::Quantized& q, const Tensor& sums_2,
                        const Tensor& num_rows_1 = {});

}  // namespace tessera
