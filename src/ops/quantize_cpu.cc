#include <cmath>

#include "ops/checks.h"
#include "ops/cpu/operand_output.h"
#include "ops/quantize.h"
#include "tensor/parallel.h"

namespace tessera {
namespace {

constexpr std::int64_t kRowsPerTask = 16;
constexpr std::int64_t kColumnsPerTask = 32 * cpu::kQuantizeSide;
/// Outputs of this size would push everything else out of the caches.
constexpr std::size_t kStreamBytes = std::size_t{16} << 20;

void check(const mx::Quantized& q, const Shape& shape) {
  TESSERA_CHECK(q.elements.shape() == shape && q.elements.is_contiguous() && q.elements.dtype() == DType::kFloat8E4M3,
                "{} {}, expected {}", q.elements.shape().to_string(), name_of(q.elements.dtype()), shape.to_string());
  TESSERA_CHECK(q.scales.shape() == mx::scales_shape(shape, q.format) && q.scales.is_contiguous() &&
                    q.scales.dtype() == mx::scales_dtype(q.format),
                "{} {}", q.scales.shape().to_string(), name_of(q.scales.dtype()));
}

/// Output of the tile whose first line is `line` and whose first number along it is `number`.
cpu::QuantizeTile::Output output_at(const mx::Quantized& q, std::int64_t line, std::int64_t number) {
  if (!q.defined()) return {.elements = nullptr, .elements_stride = 0, .scales = nullptr, .scales_stride = 0};
  const std::int64_t length = q.elements.dim(1), scales_per_line = q.scales.dim(1);
  const std::int64_t scale = line / q.format.scale_height() * scales_per_line + number / q.format.scale_width();
  return {
      .elements = q.element_bytes() + line * length + number,
      .elements_stride = length,
      .scales = static_cast<std::byte*>(q.scales.raw()) + static_cast<std::size_t>(scale) * size_of(q.scales.dtype()),
      .scales_stride = scales_per_line};
}

}  // namespace

void cpu::quantize_strip(const Strip& strip, const mx::Quantized& rows, const mx::Quantized& columns) {
  const std::size_t number = strip.element == Element::kFloat32 ? sizeof(float) : sizeof(BFloat16);
  const mx::Quantized& any = rows.defined() ? rows : columns;
  const bool stream = any.elements.num_bytes() >= kStreamBytes;
  for (std::int64_t row = 0; row < strip.num_rows; row += kQuantizeSide) {
    for (std::int64_t column = 0; column < strip.num_columns; column += kQuantizeSide) {
      const std::int64_t at = row * strip.stride + column;
      const auto* x = static_cast<const std::byte*>(strip.x) + static_cast<std::size_t>(at) * number;
      const bool has_next = column + 2 * kQuantizeSide <= strip.num_columns;
      kernels().quantize_tile({.x = x,
                               .stride = strip.stride,
                               .rows = std::min(kQuantizeSide, strip.num_rows - row),
                               .columns = std::min(kQuantizeSide, strip.num_columns - column),
                               .next = has_next ? x + static_cast<std::size_t>(kQuantizeSide) * number : nullptr,
                               .stream = stream,
                               .format = any.format,
                               .along_rows = output_at(rows, strip.first_row + row, strip.first_column + column),
                               .along_columns = output_at(columns, strip.first_column + column, strip.first_row + row)},
                              strip.element);
    }
  }
}

void cpu::check_operand(const GemmOperand& x, std::int64_t num_rows, std::int64_t length, DType dtype) {
  TESSERA_CHECK(x.plain.defined() || x.quantized());
  if (x.plain.defined()) TESSERA_CHECK_TENSOR(x.plain, dtype, {num_rows, length});
  if (x.rows.defined()) check(x.rows, {num_rows, length});
  if (x.columns.defined()) check(x.columns, {length, num_rows});
  TESSERA_CHECK(!x.rows.defined() || !x.columns.defined() || x.rows.format == x.columns.format);
}

void quantize(const Context& context, const Tensor& x, const mx::Quantized& rows, const mx::Quantized& columns) {
  const TraceScope trace(context.trace, "quantize");
  const bool stack = x.num_dims() == 3;
  TESSERA_CHECK(x.num_dims() == 2 || (stack && x.is_contiguous()), "{} {}", x.shape().to_string(), x.stride());
  if (rows.defined()) check(rows, x.shape());
  if (columns.defined()) check(columns, mx::transposed(x.shape()));
  TESSERA_CHECK(!rows.defined() || !columns.defined() || rows.format == columns.format);
  const cpu::Element element = cpu::element_of(x.dtype());
  if (context.measuring() || (!rows.defined() && !columns.defined())) return;
  const std::int64_t num_matrices = stack ? x.dim(0) : 1, m = x.dim(stack ? 1 : 0), k = x.dim(stack ? 2 : 1);
  constexpr std::int64_t kSide = cpu::kQuantizeSide;
  const std::int64_t strips_m = (m + kSide - 1) / kSide, strips_k = (k + kColumnsPerTask - 1) / kColumnsPerTask;
  parallel_for(num_matrices * strips_m * strips_k, [&](std::int64_t task) {
    const std::int64_t matrix = task / (strips_m * strips_k);
    const std::int64_t row = task / strips_k % strips_m * kSide, column = task % strips_k * kColumnsPerTask;
    const Tensor source = stack ? x[matrix] : x;
    const std::int64_t at = row * source.stride() + column;
    const auto of_matrix = [&](const mx::Quantized& q) { return stack && q.defined() ? q[matrix] : q; };
    cpu::quantize_strip(
        {.x = static_cast<const std::byte*>(source.raw()) + static_cast<std::size_t>(at) * size_of(x.dtype()),
         .stride = source.stride(),
         .element = element,
         .first_row = row,
         .num_rows = std::min(kSide, m - row),
         .first_column = column,
         .num_columns = std::min(kColumnsPerTask, k - column)},
        of_matrix(rows), of_matrix(columns));
  });
}

namespace {

/// Row `row` of all rows of a matrix, or of a stack of matrices.
cpu::DequantizeRow row_at(const mx::Quantized& x, std::int64_t row, void* out) {
  const int last = x.elements.num_dims() - 1;
  const std::int64_t rows_per_matrix = x.elements.dim(last - 1), count = x.elements.dim(last);
  const std::int64_t scale_row =
      row / rows_per_matrix * x.scales.dim(last - 1) + row % rows_per_matrix / x.format.scale_height();
  return {.elements = x.element_bytes() + row * count,
          .scales = static_cast<const std::byte*>(x.scales.raw()) +
                    static_cast<std::size_t>(scale_row * x.scales.dim(last)) * size_of(x.scales.dtype()),
          .format = x.format,
          .count = count,
          .out = out};
}

}  // namespace

void dequantize(const Context& context, const mx::Quantized& x, const Tensor& y) {
  const TraceScope trace(context.trace, "dequantize");
  check(x, y.shape());
  TESSERA_CHECK(y.is_contiguous());
  const cpu::Element element = cpu::element_of(y.dtype());
  if (context.measuring()) return;
  const std::int64_t count = y.dim(y.num_dims() - 1);
  const std::int64_t num_rows = y.num_elements() / std::max<std::int64_t>(count, 1);
  parallel_ranges(num_rows, kRowsPerTask, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      std::byte* out = static_cast<std::byte*>(y.raw()) + static_cast<std::size_t>(row * count) * size_of(y.dtype());
      cpu::kernels().dequantize_row(row_at(x, row, out), element);
    }
  });
}

double ErrorSums::sqnr_db() const { return 10.0 * std::log10(signal / noise); }

ErrorSums quantization_error(const Context& context, const Tensor& x, const mx::Quantized& q, std::int64_t num_rows) {
  const TraceScope trace(context.trace, "quantization_error");
  check(q, x.shape());
  const std::int64_t count = x.dim(x.num_dims() - 1), stride = x.num_dims() == 2 ? x.stride() : count;
  const std::int64_t rows = num_rows < 0 ? x.num_elements() / count : num_rows;
  const ArenaScope scope(*context.arena);
  const Tensor parts = context.arena->allocate(
      {(x.num_elements() / count + kRowsPerTask - 1) / kRowsPerTask, sizeof(ErrorSums) / sizeof(float)},
      DType::kFloat32);
  const cpu::ThreadScratch scratch(context, static_cast<std::size_t>(count) * sizeof(float));
  if (context.measuring()) return {};
  auto* part = static_cast<ErrorSums*>(parts.raw());
  cpu::for_float_type(x.dtype(), [&]<typename T>(T) {
    parallel_ranges(rows, kRowsPerTask, [&](std::int64_t begin, std::int64_t end) {
      auto* values = reinterpret_cast<float*>(scratch.mine());
      ErrorSums sums;
      for (std::int64_t row = begin; row < end; ++row) {
        cpu::kernels().dequantize_row(row_at(q, row, values), cpu::Element::kFloat32);
        const T* from = x.data<T>() + row * stride;
        double signal = 0.0, noise = 0.0;
#pragma omp simd reduction(+ : signal, noise)
        for (std::int64_t i = 0; i < count; ++i) {
          const double number = static_cast<double>(cpu::load(from[i]));
          const double difference = number - static_cast<double>(values[i]);
          signal += number * number;
          noise += difference * difference;
        }
        sums += {.signal = signal, .noise = noise};
      }
      part[begin / kRowsPerTask] = sums;
    });
  });
  ErrorSums sums;
  for (std::int64_t i = 0; i * kRowsPerTask < rows; ++i) sums += part[i];
  return sums;
}

}  // namespace tessera
