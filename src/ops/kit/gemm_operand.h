// The operands of GEMMs, in the forms that the GEMMs of all passes need. An operator that produces an operand writes
// all these forms in one pass over its data.
#pragma once

#include "mx/quantized.h"
#include "ops/runtime/context.h"

namespace tessera {

/// Holds a matrix x [M, K] in plain form and in quantized forms. A form that is undefined is not wanted and not
/// written. rows and columns are contiguous, and each has a format of its own.
struct GemmOperand {
  GemmOperand() = default;
  /// Converts a plain matrix to an operand, implicitly.
  GemmOperand(const Tensor& x) : plain(x) {}

  Tensor plain;           // [M, K], contiguous
  mx::Quantized rows;     // [M, K], blocks along K: for a GEMM that contracts K
  mx::Quantized columns;  // [K, M], blocks along M: for a GEMM that contracts M

  bool defined() const { return plain.defined() || quantized(); }
  bool quantized() const { return rows.defined() || columns.defined(); }
};

/// Throws unless x is the quantized form of a matrix, or of a stack of matrices, of this shape.
void check_quantized(const mx::Quantized& x, const Shape& shape);
/// Throws unless at least one form of x is defined and all defined forms are those of a matrix [num_rows, length].
void check_operand(const GemmOperand& x, std::int64_t num_rows, std::int64_t length, DType dtype);

/// The forms in which products read a weight. weight_form() in ops/gemm/quantized_gemm.h chooses one.
enum class WeightForm : std::uint8_t {
  kRows,  // On a CPU, for square blocks, which serve both orientations.
  kRowsAndColumns,
  kWide,  // On Hopper, for MXFP8 with blocks of 32: bfloat16 takes the place of the elements and scales.
};

/// Holds a quantized weight [N, K], or a stack [E, N, K] of them. Parts that its form does not have are undefined.
struct QuantizedWeight {
  mx::Quantized rows;     // [.., N, K], for the forward
  mx::Quantized columns;  // [.., K, N], for the input's gradient
  /// The same numbers in bfloat16, which holds them exactly. They have the shapes of wide_shape() and the order of
  /// ops/gemm/sm90/sm90_widen.cuh.
  Tensor wide_rows, wide_columns;

  /// Returns matrix i of a stack.
  QuantizedWeight operator[](std::int64_t i) const {
    const auto part = [i](const auto& x) { return x.defined() ? x[i] : x; };
    return {part(rows), part(columns), part(wide_rows), part(wide_columns)};
  }
};

/// Throws unless the defined forms of w are those of a weight of this shape.
void check_quantized(const QuantizedWeight& w, const Shape& shape);

/// In the wide form of a weight, rows are padded with zeros to a multiple of the kernel's step.
inline constexpr std::int64_t kWideStep = 64;
inline Shape wide_shape(const Shape& shape) {
  const std::int64_t length = (shape[shape.num_dims() - 1] + kWideStep - 1) / kWideStep * kWideStep;
  return shape.num_dims() == 2 ? Shape{shape[0], length} : Shape{shape[0], shape[1], length};
}

/// Allocates a weight by calls of `allocate(shape, dtype)`.
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
