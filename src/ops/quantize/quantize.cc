#include "ops/quantize/quantize.h"

#include <cmath>
#include <limits>

#include "ops/kit/checks.h"
#include "ops/runtime/backends.h"
#include "tensor/dims.h"

namespace tessera {

TESSERA_BACKENDS(quantize)
TESSERA_BACKENDS(quantize_weight)
TESSERA_BACKENDS(dequantize)
TESSERA_BACKENDS(quantization_error)

namespace {

void check_number(DType dtype) {
  TESSERA_CHECK(dtype == DType::kFloat32 || dtype == DType::kBFloat16, "{}", name_of(dtype));
}

}  // namespace

void check_quantized(const mx::Quantized& x, const Shape& shape) {
  TESSERA_CHECK(x.elements.shape() == shape && x.elements.is_contiguous() && x.elements.dtype() == DType::kFloat8E4M3,
                "{} {}, expected {}", x.elements.shape().to_string(), name_of(x.elements.dtype()), shape.to_string());
  TESSERA_CHECK(x.scales.shape() == mx::scales_shape(shape, x.format) && x.scales.is_contiguous() &&
                    x.scales.dtype() == mx::scales_dtype(x.format),
                "{} {}", x.scales.shape().to_string(), name_of(x.scales.dtype()));
}

void check_quantized(const QuantizedWeight& w, const Shape& shape) {
  const Shape transposed = mx::transposed(shape);
  if (w.wide_rows.defined()) {
    TESSERA_CHECK(!w.rows.defined() && !w.columns.defined());
    TESSERA_CHECK_TENSOR(w.wide_rows, DType::kBFloat16, (wide_shape(shape)));
    TESSERA_CHECK_TENSOR(w.wide_columns, DType::kBFloat16, (wide_shape(transposed)));
    return;
  }
  if (w.rows.defined()) check_quantized(w.rows, shape);
  if (w.columns.defined()) check_quantized(w.columns, transposed);
}

void check_operand(const GemmOperand& x, std::int64_t num_rows, std::int64_t length, DType dtype) {
  TESSERA_CHECK(x.plain.defined() || x.quantized());
  if (x.plain.defined()) TESSERA_CHECK_TENSOR(x.plain, dtype, {num_rows, length});
  if (x.rows.defined()) check_quantized(x.rows, {num_rows, length});
  if (x.columns.defined()) check_quantized(x.columns, {length, num_rows});
}

void quantize(const Context& context, const Tensor& x, const mx::Quantized& rows, const mx::Quantized& columns) {
  const TraceScope trace(context.trace, "quantize");
  TESSERA_CHECK(x.num_dims() == 2 || (x.num_dims() == 3 && x.is_contiguous()), "{} {}", x.shape().to_string(),
                x.stride());
  if (rows.defined()) check_quantized(rows, x.shape());
  if (columns.defined()) check_quantized(columns, mx::transposed(x.shape()));
  check_number(x.dtype());
  TESSERA_RUN(quantize, context, x, rows, columns);
}

void quantize_weight(const Context& context, const Tensor& w, const mx::Format& format,
                     const QuantizedWeight& quantized) {
  if (!quantized.wide_rows.defined()) return quantize(context, w, quantized.rows, quantized.columns);
  const TraceScope trace(context.trace, "quantize_weight");
  TESSERA_CHECK(w.is_contiguous(), "{}", w.stride());
  check_number(w.dtype());
  check_quantized(quantized, w.shape());
  TESSERA_RUN(quantize_weight, context, w, format, quantized);
}

void dequantize(const Context& context, const mx::Quantized& x, const Tensor& y) {
  const TraceScope trace(context.trace, "dequantize");
  check_quantized(x, y.shape());
  TESSERA_CHECK(y.is_contiguous());
  check_number(y.dtype());
  TESSERA_RUN(dequantize, context, x, y);
}

double ErrorSums::sqnr_db() const {
  return noise == 0.0 ? std::numeric_limits<double>::infinity() : 10.0 * std::log10(signal / noise);
}

void quantization_error(const Context& context, const Tensor& x, const mx::Quantized& q, const Tensor& sums_2,
                        const Tensor& num_rows_1) {
  const TraceScope trace(context.trace, "quantization_error");
  TESSERA_DIMS(sums_2, num_rows_1);
  check_quantized(q, x.shape());
  check_number(x.dtype());
  TESSERA_CHECK_TENSOR(sums_2, DType::kFloat64, {2});
  if (num_rows_1.defined()) TESSERA_CHECK_TENSOR(num_rows_1, DType::kInt32, {1});
  TESSERA_RUN(quantization_error, context, x, q, sums_2, num_rows_1);
}

DType wide_type(const mx::Quantized& x) {
  return x.format.scale_type == mx::ScaleType::kE8M0 ? DType::kBFloat16 : DType::kFloat32;
}

Tensor widened(const Context& context, const mx::Quantized& x, DType dtype) {
  const Tensor wide = context.arena->allocate(x.elements.shape(), dtype);
  dequantize(context, x, wide);
  return wide;
}

}  // namespace tessera
