#include "ops/cpu/operand_output.h"
#include "ops/quantize/quantize.h"
#include "tensor/parallel.h"

namespace tessera::cpu {
namespace {

constexpr std::int64_t kQuantizeRowsPerTask = 16;
constexpr std::int64_t kColumnsPerTask = 32 * kQuantizeSide;
/// Outputs of this size bypass the caches, because they would evict everything else from them.
constexpr std::size_t kStreamBytes = std::size_t{16} << 20;

/// Holds the largest magnitudes of a part's rows and columns, as bits. The part has at most kWidestBlock of each.
struct PartAmax {
  std::uint32_t of_rows[mx::kWidestBlock] = {}, of_columns[mx::kWidestBlock] = {};

  template <typename T>
  void find(const T* x, std::int64_t stride, std::int64_t rows, std::int64_t columns) {
    *this = {};
    for (std::int64_t row = 0; row < rows; ++row, x += stride) {
      std::uint32_t of_row = 0;
#pragma omp simd reduction(max : of_row)
      for (std::int64_t column = 0; column < columns; ++column) {
        const std::uint32_t magnitude = mx::bits_of(load(x[column])) & mx::kFloatMagnitude;
        of_row = std::max(of_row, magnitude);
        of_columns[column] = std::max(of_columns[column], magnitude);
      }
      of_rows[row] = of_row;
    }
  }
  /// Gives all rows, or all columns, the largest magnitude of the part.
  void widen_rows() { std::ranges::fill(of_rows, *std::ranges::max_element(of_rows)); }
  void widen_columns() { std::ranges::fill(of_columns, *std::ranges::max_element(of_columns)); }
};

bool is_widest(const mx::Quantized& q) { return q.defined() && q.format.along == mx::kWidestBlock; }

/// Returns the output of the tile that begins at line `line` and at number `number` along it.
QuantizeTile::Output output_at(const mx::Quantized& q, std::int64_t line, std::int64_t number,
                               const std::uint32_t* amax) {
  if (!q.defined()) return {};
  const std::int64_t length = q.elements.dim(1), scales_per_line = q.scales.dim(1);
  const std::int64_t scale = line / q.format.scale_height() * scales_per_line + number / q.format.scale_width();
  return {
      .elements = q.element_bytes() + line * length + number,
      .elements_stride = length,
      .scales = static_cast<std::byte*>(q.scales.raw()) + static_cast<std::size_t>(scale) * size_of(q.scales.dtype()),
      .scales_stride = scales_per_line,
      .format = q.format,
      .amax = is_widest(q) ? amax : nullptr};
}

}  // namespace

std::int64_t quantize_side(const mx::Quantized& rows, const mx::Quantized& columns) {
  return is_widest(rows) || is_widest(columns) ? mx::kWidestBlock : kQuantizeSide;
}

void quantize_strip(const Strip& strip, const mx::Quantized& rows, const mx::Quantized& columns) {
  const std::size_t number = strip.element == Element::kFloat32 ? sizeof(float) : sizeof(BFloat16);
  const mx::Quantized& any = rows.defined() ? rows : columns;
  const bool stream = any.elements.num_bytes() >= kStreamBytes;
  const auto numbers_at = [&](std::int64_t row, std::int64_t column) {
    return static_cast<const std::byte*>(strip.x) + static_cast<std::size_t>(row * strip.stride + column) * number;
  };
  const auto quantize_at = [&](std::int64_t row, std::int64_t column, const std::uint32_t* of_rows,
                               const std::uint32_t* of_columns) {
    const std::byte* x = numbers_at(row, column);
    const bool has_next = column + 2 * kQuantizeSide <= strip.num_columns;
    kernels().quantize_tile(
        {.x = x,
         .stride = strip.stride,
         .rows = std::min(kQuantizeSide, strip.num_rows - row),
         .columns = std::min(kQuantizeSide, strip.num_columns - column),
         .next = has_next ? x + static_cast<std::size_t>(kQuantizeSide) * number : nullptr,
         .stream = stream,
         .along_rows = output_at(rows, strip.first_row + row, strip.first_column + column, of_rows),
         .along_columns = output_at(columns, strip.first_column + column, strip.first_row + row, of_columns)},
        strip.element);
  };
  // A part has all numbers that share a scale.
  const std::int64_t side = quantize_side(rows, columns);
  PartAmax amax;  // of blocks that are larger than a tile
  for (std::int64_t row = 0; row < strip.num_rows; row += side) {
    for (std::int64_t column = 0; column < strip.num_columns; column += side) {
      const std::int64_t end_row = std::min(row + side, strip.num_rows),
                         end_column = std::min(column + side, strip.num_columns);
      if (side > kQuantizeSide) {
        const auto find = [&]<typename T>(T) {
          amax.find(reinterpret_cast<const T*>(numbers_at(row, column)), strip.stride, end_row - row,
                    end_column - column);
        };
        strip.element == Element::kFloat32 ? find(float{}) : find(BFloat16{});
        if (rows.format.across > 1) amax.widen_rows();
        if (columns.format.across > 1) amax.widen_columns();
      }
      for (std::int64_t r = row; r < end_row; r += kQuantizeSide) {
        for (std::int64_t c = column; c < end_column; c += kQuantizeSide) {
          quantize_at(r, c, &amax.of_rows[r - row], &amax.of_columns[c - column]);
        }
      }
    }
  }
}

void quantize(const Context& context, const Tensor& x, const mx::Quantized& rows, const mx::Quantized& columns) {
  const bool stack = x.num_dims() == 3;
  const Element element = element_of(x.dtype());
  if (context.measuring() || (!rows.defined() && !columns.defined())) return;
  const std::int64_t num_matrices = stack ? x.dim(0) : 1, m = x.dim(stack ? 1 : 0), k = x.dim(stack ? 2 : 1);
  const std::int64_t side = quantize_side(rows, columns);
  const std::int64_t strips_m = (m + side - 1) / side, strips_k = (k + kColumnsPerTask - 1) / kColumnsPerTask;
  parallel_for(num_matrices * strips_m * strips_k, [&](std::int64_t task) {
    const std::int64_t matrix = task / (strips_m * strips_k);
    const std::int64_t row = task / strips_k % strips_m * side, column = task % strips_k * kColumnsPerTask;
    const Tensor source = stack ? x[matrix] : x;
    const std::int64_t at = row * source.stride() + column;
    const auto of_matrix = [&](const mx::Quantized& q) { return stack && q.defined() ? q[matrix] : q; };
    quantize_strip(
        {.x = static_cast<const std::byte*>(source.raw()) + static_cast<std::size_t>(at) * size_of(x.dtype()),
         .stride = source.stride(),
         .element = element,
         .first_row = row,
         .num_rows = std::min(side, m - row),
         .first_column = column,
         .num_columns = std::min(kColumnsPerTask, k - column)},
        of_matrix(rows), of_matrix(columns));
  });
}

namespace {

/// Describes row `row` of x, counted over all matrices of a stack.
DequantizeRow row_at(const mx::Quantized& x, std::int64_t row, void* out) {
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

void quantize_weight(const Context&, const Tensor&, const mx::Format&, const QuantizedWeight&) {
  TESSERA_CHECK(false, "a wide weight on a CPU");
}

void dequantize(const Context& context, const mx::Quantized& x, const Tensor& y) {
  const Element element = element_of(y.dtype());
  if (context.measuring()) return;
  const std::int64_t count = y.dim(y.num_dims() - 1);
  const std::int64_t num_rows = y.num_elements() / std::max<std::int64_t>(count, 1);
  parallel_ranges(num_rows, kQuantizeRowsPerTask, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      std::byte* out = static_cast<std::byte*>(y.raw()) + static_cast<std::size_t>(row * count) * size_of(y.dtype());
      kernels().dequantize_row(row_at(x, row, out), element);
    }
  });
}

void quantization_error(const Context& context, const Tensor& x, const mx::Quantized& q, const Tensor& sums_2,
                        const Tensor& num_rows_1) {
  const std::int64_t count = x.dim(x.num_dims() - 1), stride = x.num_dims() == 2 ? x.stride() : count;
  const ArenaScope scope(*context.arena);
  const Tensor parts = context.arena->allocate(
      {(x.num_elements() / count + kQuantizeRowsPerTask - 1) / kQuantizeRowsPerTask, sizeof(ErrorSums) / sizeof(float)},
      DType::kFloat32);
  const ThreadScratch scratch(context, static_cast<std::size_t>(count) * sizeof(float));
  if (context.measuring()) return;
  const std::int64_t rows = computed_rows(num_rows_1, x.num_elements() / count);
  auto* part = static_cast<ErrorSums*>(parts.raw());
  for_float_type(x.dtype(), [&]<typename T>(T) {
    parallel_ranges(rows, kQuantizeRowsPerTask, [&](std::int64_t begin, std::int64_t end) {
      auto* values = reinterpret_cast<float*>(scratch.mine());
      ErrorSums sums;
      for (std::int64_t row = begin; row < end; ++row) {
        kernels().dequantize_row(row_at(q, row, values), Element::kFloat32);
        const T* from = x.data<T>() + row * stride;
        double signal = 0.0, noise = 0.0;
#pragma omp simd reduction(+ : signal, noise)
        for (std::int64_t i = 0; i < count; ++i) {
          const double number = static_cast<double>(load(from[i]));
          const double difference = number - static_cast<double>(values[i]);
          signal += number * number;
          noise += difference * difference;
        }
        sums += {.signal = signal, .noise = noise};
      }
      part[begin / kQuantizeRowsPerTask] = sums;
    });
  });
  ErrorSums sums;
  for (std::int64_t i = 0; i * kQuantizeRowsPerTask < rows; ++i) sums += part[i];
  sums_2.data<double>()[0] += sums.signal;
  sums_2.data<double>()[1] += sums.noise;
}

}  // namespace tessera::cpu
