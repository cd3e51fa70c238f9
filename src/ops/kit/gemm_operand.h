// What a GEMM reads, in the forms that its passes need: an operator that produces a GEMM's operand writes all of them
// from one pass over its data.
#pragma once

#include "mx/quantized.h"
#include "ops/runtime/context.h"

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

/// The forms of a weight that products read (weight_form() in ops/gemm/quantized_gemm.h).
enum class WeightForm : std::uint8_t {
  kRows,  // on a CPU, of square blocks, which serve both orientations
  kRowsAndColumns,
  kWide,  // on Hopper, of MXFP8 with blocks of 32, in place of the elements
};

/// A quantized weight [N, K], or a stack [E, N, K] of them. Parts that its form does not have are undefined.
struct QuantizedWeight {
  mx::Quantized rows;     // [.., N, K], for the forward
  mx::Quantized columns;  // [.., K, N], for the input's gradient
  /// The same numbers in bfloat16, which holds them exactly, with wide_shape()'s shapes and in the order of
  /// ops/gemm/sm90/sm90_widen.cuh.
  Tensor wide_rows, wide_columns;
};

/// In the wide form of a weight, lines are filled up with zeros to whole steps of the kernel.
inline constexpr std::int64_t kWideStep = 64;
inline Shape wide_shape(const Shape& shape) {
  const std::int64_t length = (shape[shape.num_dims() - 1] + kWideStep - 1) / kWideStep * kWideStep;
  return shape.num_dims() == 2 ? Shape{shape[0], length} : Shape{shape[0], shape[1], length};
}

/// `allocate(shape, dtype)` gives the tensors.
template <typename Allocate>
QuantizedWeight allocate_weight(WeightForm form, const Shape& shape, const mx::Format& format, Allocate&& allocate) {
  QuantizedWeight weight;
  const Shape transposed = mx::transposed(shape);
  if (form == WeightForm::kWide) {
    weight.wide_rows = allocate(wide_shape(shape), DType::kBFloat16);
    weight.wide_columns = allocate(wide_shape(transposed), DType::kBFloat16);
    return weight;
  }
  weight.rows = allocate_quantized(shape, format, allocate);
  if (form == WeightForm::kRowsAndColumns) weight.columns = allocate_quantized(transposed, format, allocate);
  return weight;
}

}  // namespace tessera
