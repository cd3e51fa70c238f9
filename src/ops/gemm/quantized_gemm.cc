#include "ops/gemm/quantized_gemm.h"

#include "ops/kit/checks.h"
#include "ops/runtime/backends.h"
#include "tensor/dims.h"

namespace tessera {

TESSERA_BACKENDS(weight_form)
TESSERA_BACKENDS(linear_forward)
TESSERA_BACKENDS(linear_dgrad)
TESSERA_BACKENDS(linear_wgrad)
TESSERA_BACKENDS(grouped_linear_forward)
TESSERA_BACKENDS(grouped_linear_dgrad)
TESSERA_BACKENDS(grouped_linear_wgrad)

namespace {

/// Checks y [rows of x, M] = x · wᵀ for an operand [rows, N] and a weight [.., M, N].
void check_product(const mx::Quantized& x, const mx::Quantized& w, const Tensor& y) {
  const int last = w.elements.num_dims() - 1;
  TESSERA_CHECK(x.elements.dim(1) == w.elements.dim(last), "{} {}", x.elements.shape().to_string(),
                w.elements.shape().to_string());
  TESSERA_CHECK(y.shape() == Shape({x.elements.dim(0), w.elements.dim(last - 1)}), "{}", y.shape().to_string());
  TESSERA_CHECK(x.format.scale_type == w.format.scale_type);
}

/// Checks the same product with a wide weight.
void check_wide_product(const mx::Quantized& x, const Tensor& wide, const Tensor& y) {
  const int last = wide.num_dims() - 1;
  const Shape& x_shape = x.elements.shape();
  TESSERA_CHECK(wide_shape(x_shape)[1] == wide.dim(last), "{} {}", x_shape.to_string(), wide.shape().to_string());
  TESSERA_CHECK_TENSOR(y, DType::kBFloat16, {x_shape[0], wide.dim(last - 1)});
  TESSERA_CHECK(x.format.scale_type == mx::ScaleType::kE8M0);
}

void check_forward(const mx::Quantized& x, const QuantizedWeight& w, const Tensor& y) {
  w.wide_rows.defined() ? check_wide_product(x, w.wide_rows, y) : check_product(x, w.rows, y);
}

/// Checks d_w [.., M, N] against d_yᵀ [M, R] and xᵀ [N, R].
void check_wgrad(const mx::Quantized& d_y, const mx::Quantized& x, const Tensor& d_w) {
  const int last = d_w.num_dims() - 1;
  TESSERA_CHECK(d_y.elements.dim(0) == d_w.dim(last - 1) && x.elements.dim(0) == d_w.dim(last) &&
                    d_y.elements.dim(1) == x.elements.dim(1),
                "{} {} {}", d_y.elements.shape().to_string(), x.elements.shape().to_string(), d_w.shape().to_string());
  TESSERA_CHECK(d_w.dtype() == DType::kFloat32, "{}", name_of(d_w.dtype()));
  TESSERA_CHECK(d_y.format.scale_type == x.format.scale_type);
}

/// Checks the weight in the form that dgrad reads. Without columns, its blocks must be square.
void check_dgrad(const mx::Quantized& d_y, const QuantizedWeight& w, const Tensor& d_x) {
  if (w.wide_columns.defined()) return check_wide_product(d_y, w.wide_columns, d_x);
  if (w.columns.defined()) return check_product(d_y, w.columns, d_x);
  TESSERA_CHECK(w.rows.format.square());
}

void check_offsets(const Tensor& offsets_E1, const QuantizedWeight& w) {
  const Tensor& any = w.wide_rows.defined() ? w.wide_rows : w.rows.defined() ? w.rows.elements : w.columns.elements;
  TESSERA_CHECK_TENSOR(offsets_E1, DType::kInt32, {any.dim(0) + 1});
}

}  // namespace

WeightForm weight_form(const Context& context, const Shape& shape, const mx::Format& format, DType dtype) {
  return TESSERA_RUN(weight_form, context, shape, format, dtype);
}

void linear_forward(const Context& context, const mx::Quantized& x_TN, const QuantizedWeight& w_MN, const Tensor& y_TM,
                    Write write) {
  check_forward(x_TN, w_MN, y_TM);
  TESSERA_RUN(linear_forward, context, x_TN, w_MN, y_TM, write);
}

void linear_dgrad(const Context& context, const mx::Quantized& d_y_TM, const QuantizedWeight& w_MN,
                  const Tensor& d_x_TN, Write write) {
  check_dgrad(d_y_TM, w_MN, d_x_TN);
  TESSERA_RUN(linear_dgrad, context, d_y_TM, w_MN, d_x_TN, write);
}

void linear_wgrad(const Context& context, const mx::Quantized& d_y_MT, const mx::Quantized& x_NT, const Tensor& d_w_MN,
                  Write write) {
  check_wgrad(d_y_MT, x_NT, d_w_MN);
  TESSERA_RUN(linear_wgrad, context, d_y_MT, x_NT, d_w_MN, write);
}

void grouped_linear_forward(const Context& context, const mx::Quantized& x_RN, const QuantizedWeight& w_EMN,
                            const Tensor& offsets_E1, const Tensor& y_RM) {
  const TraceScope trace(context.trace, "grouped_gemm.forward");
  TESSERA_DIMS(offsets_E1, y_RM);
  check_forward(x_RN, w_EMN, y_RM);
  TESSERA_CHECK(y_RM.is_contiguous(), "{}", y_RM.stride());
  check_offsets(offsets_E1, w_EMN);
  TESSERA_RUN(grouped_linear_forward, context, x_RN, w_EMN, offsets_E1, y_RM);
}

void grouped_linear_dgrad(const Context& context, const mx::Quantized& d_y_RM, const QuantizedWeight& w_EMN,
                          const Tensor& offsets_E1, const Tensor& d_x_RN) {
  const TraceScope trace(context.trace, "grouped_gemm.dgrad");
  TESSERA_DIMS(offsets_E1, d_x_RN);
  check_dgrad(d_y_RM, w_EMN, d_x_RN);
  TESSERA_CHECK(d_x_RN.is_contiguous(), "{}", d_x_RN.stride());
  check_offsets(offsets_E1, w_EMN);
  TESSERA_RUN(grouped_linear_dgrad, context, d_y_RM, w_EMN, offsets_E1, d_x_RN);
}

void grouped_linear_wgrad(const Context& context, const mx::Quantized& d_y_MR, const mx::Quantized& x_NR,
                          const Tensor& offsets_E1, const Tensor& d_w_EMN, Write write) {
  const TraceScope trace(context.trace, "grouped_gemm.wgrad");
  TESSERA_DIMS(offsets_E1, d_w_EMN);
  check_wgrad(d_y_MR, x_NR, d_w_EMN);
  TESSERA_CHECK(d_w_EMN.is_contiguous(), "{}", d_w_EMN.stride());
  TESSERA_CHECK_TENSOR(offsets_E1, DType::kInt32, {d_w_EMN.dim(0) + 1});
  TESSERA_RUN(grouped_linear_wgrad, context, d_y_MR, x_NR, offsets_E1, d_w_EMN, write);
}

}  // namespace tessera
