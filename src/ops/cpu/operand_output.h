// The output of operators that produce a GEMM's operand. Rows are written to where they are wanted, and are quantized
// while they are in the cache.
#pragma once

#include <algorithm>
#include <optional>

#include "ops/cpu/types.h"
#include "ops/kit/gemm_operand.h"

namespace tessera::cpu {

/// Describes a part of a matrix: `num_rows` rows from `first_row` on, and `num_columns` columns from `first_column` on.
/// Both firsts are multiples of quantize_side(). x points to the part's first number, and stride counts numbers.
struct Strip {
  const void* x;
  std::int64_t stride;
  Element element;
  std::int64_t first_row, num_rows, first_column, num_columns;
};

/// Returns the side of squares that hold all numbers which share a scale.
std::int64_t quantize_side(const mx::Quantized& rows, const mx::Quantized& columns);
inline std::int64_t quantize_side(const GemmOperand& x) { return quantize_side(x.rows, x.columns); }

/// Quantizes the strip in the calling thread, and writes its part of `rows` and of `columns`.
void quantize_strip(const Strip& strip, const mx::Quantized& rows, const mx::Quantized& columns);

/// Returns how many of `all` rows are computed. This is num_rows_1[0], or `all` if num_rows_1 is undefined.
inline std::int64_t computed_rows(const Tensor& num_rows_1, std::int64_t all) {
  if (!num_rows_1.defined()) return all;
  const std::int32_t count = num_rows_1.data<std::int32_t>()[0];
  TESSERA_CHECK(0 <= count && count <= all, "{} of {}", count, all);
  return count;
}

/// Writes an operator's output [num_rows, length]. Each task of the operator computes whole rows. Tasks start at
/// multiples of rows_per_task().
class OperandOutput {
 public:
  /// y is an operand that check_operand() accepts. If rows are wanted in quantized form only, the constructor allocates
  /// scratch memory for them. A task has at least `least_side` rows if y is quantized.
  OperandOutput(const Context& context, const GemmOperand& y, std::int64_t length, DType dtype,
                std::int64_t least_side = 0)
      : y_(y), length_(length), dtype_(dtype), side_(std::max(quantize_side(y), least_side)) {
    if (y.quantized() && !y.plain.defined()) {
      scratch_.emplace(context, static_cast<std::size_t>(side_ * length) * size_of(dtype));
    }
  }

  std::int64_t rows_per_task(std::int64_t unless_quantized) const { return y_.quantized() ? side_ : unless_quantized; }
  /// Returns where a task must write rows [first, first + rows_per_task()), one after the other.
  template <typename T>
  T* rows(std::int64_t first) const {
    return scratch_ ? reinterpret_cast<T*>(scratch_->mine()) : y_.plain.data<T>() + first * length_;
  }
  /// Must be called after a task has written rows [first, end). Quantizes them if that is wanted.
  template <typename T>
  void finish(std::int64_t first, std::int64_t end) const {
    if (!y_.quantized()) return;
    quantize_strip({.x = rows<T>(first),
                    .stride = length_,
                    .element = element_of(dtype_),
                    .first_row = first,
                    .num_rows = end - first,
                    .first_column = 0,
                    .num_columns = length_},
                   y_.rows, y_.columns);
  }

 private:
  GemmOperand y_;
  std::int64_t length_;
  DType dtype_;
  std::int64_t side_;
  std::optional<ThreadScratch> scratch_;
};

}  // namespace tessera::cpu
