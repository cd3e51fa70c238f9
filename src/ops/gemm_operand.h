// What a GEMM reads, in the forms that its passes need: an operator that produces a GEMM's operand writes all of them
// from one pass over its data.
#pragma once

#include "mx/quantized.h"
#include "ops/context.h"

namespace tessera {

/// A matrix x [M, K]: as it is, and quantized. What is undefined is not wanted, and not written. rows and columns are
/// contiguous and have one format.
struct GemmOperand {
  GemmOperand() = default;
  /// A plain matrix is an operand.
  GemmOperand(const Tensor& x) : plain(x) {}

  Tensor plain;           // [M, K], contiguous
  mx::Quantized rows;     // [M, K], blocks along K: for a GEMM that contracts K
  mx::Quantized columns;  // [K, M], blocks along M: for a GEMM that contracts M

  bool quantized() const { return rows.defined() || columns.defined(); }
};

/// Throws unless x is a matrix, or a stack of matrices, of this shape in quantized form.
void check_quantized(const mx::Quantized& x, const Shape& shape);
/// Throws unless the defined parts of x are those of a matrix [num_rows, length], and one is.
void check_operand(const GemmOperand& x, std::int64_t num_rows, std::int64_t length, DType dtype);

/// A weight [N, K], or a stack [E, N, K] of them, quantized.
struct QuantizedWeight {
  mx::Quantized rows;  // [.., N, K], for the forward
  /// [.., K, N], for the input's gradient. On a CPU undefined if blocks are square, where rows serves both.
  mx::Quantized columns;
};

}  // namespace tessera
