// For operators that produce a GEMM's operand: rows go to where they are wanted, and are quantized while they are in
// the cache.
#pragma once

#include <optional>

#include "ops/cpu/types.h"
#include "ops/kit/gemm_operand.h"

namespace tessera::cpu {

/// Part of a matrix x: `num_rows` rows from `first_row`, a multiple of kQuantizeSide, and likewise columns. x: its
/// first number; stride in numbers.
struct Strip {
  const void* x;
  std::int64_t stride;
  Element element;
  std::int64_t first_row, num_rows, first_column, num_columns;
};

/// The part of rows and columns that the strip determines; in the calling thread.
void quantize_strip(const Strip& strip, const mx::Quantized& rows, const mx::Quantized& columns);

/// Rows that are computed of `all` that there are: num_rows_1[0], or all if it is undefined.
inline std::int64_t computed_rows(const Tensor& num_rows_1, std::int64_t all) {
  if (!num_rows_1.defined()) return all;
  const std::int32_t count = num_rows_1.data<std::int32_t>()[0];
  TESSERA_CHECK(0 <= count && count <= all, "{} of {}", count, all);
  return count;
}

/// An operator's output [num_rows, length]. Its tasks compute whole rows, from a multiple of rows_per_task() on.
class OperandOutput {
 public:
  /// y is what check_operand() accepts. Takes scratch memory for rows that are wanted in quantized form only.
  OperandOutput(const Context& context, const GemmOperand& y, std::int64_t length, DType dtype)
      : y_(y), length_(length), dtype_(dtype) {
    if (y.quantized() && !y.plain.defined()) {
      scratch_.emplace(context, static_cast<std::size_t>(kQuantizeSide * length) * size_of(dtype));
    }
  }

  std::int64_t rows_per_task(std::int64_t unless_quantized) const {
    return y_.quantized() ? kQuantizeSide : unless_quantized;
  }
  /// Where rows [first, first + rows_per_task()) are to be written, one behind the other.
  template <typename T>
  T* rows(std::int64_t first) const {
    return scratch_ ? reinterpret_cast<T*>(scratch_->mine()) : y_.plain.data<T>() + first * length_;
  }
  /// After rows [first, end) have been written there.
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
  std::optional<ThreadScratch> scratch_;
};

}  // namespace tessera::cpu
