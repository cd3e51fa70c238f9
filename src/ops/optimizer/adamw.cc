#include "ops/optimizer/adamw.h"

#include <cmath>

#include "ops/kit/checks.h"
#include "ops/runtime/backends.h"
#include "tensor/dims.h"

namespace tessera {

TESSERA_BACKENDS(sum_of_squares)
TESSERA_BACKENDS(clip_gradients)
TESSERA_BACKENDS(adamw)
TESSERA_BACKENDS(adamw_quantized)

namespace {

void check_step(const Tensor& step_S, const Tensor& d_w_N, const Tensor& m_N, const Tensor& v_N, const Tensor& w_N) {
  TESSERA_DIMS(step_S, d_w_N, m_N, v_N, w_N);
  const std::int64_t size = w_N.dim(0);
  TESSERA_CHECK_TENSOR(step_S, DType::kFloat32, {AdamWStep::kNumbers});
  for (const Tensor& tensor : {d_w_N, w_N}) TESSERA_CHECK_TENSOR(tensor, DType::kFloat32, {size});
  const DType moments = m_N.dtype() == DType::kBFloat16 ? DType::kBFloat16 : DType::kFloat32;
  for (const Tensor& tensor : {m_N, v_N}) TESSERA_CHECK_TENSOR(tensor, moments, {size});
}

}  // namespace

AdamWStep adamw_step(const AdamWOptions& options, float learning_rate, std::int64_t step) {
  const auto correction = [&](float beta) {
    return static_cast<float>(1.0 / (1.0 - std::pow(static_cast<double>(beta), static_cast<double>(step))));
  };
  return {.learning_rate = learning_rate,
          .correction1 = correction(options.beta1),
          .correction2 = correction(options.beta2)};
}

void sum_of_squares(const Context& context, const Tensor& x_N, const Tensor& squares_1) {
  const TraceScope trace(context.trace, "sum_of_squares");
  TESSERA_DIMS(x_N, squares_1);
  TESSERA_CHECK_TENSOR(x_N, DType::kFloat32, {x_N.dim(0)});
  TESSERA_CHECK_TENSOR(squares_1, DType::kFloat64, {1});
  TESSERA_RUN(sum_of_squares, context, x_N, squares_1);
}

void clip_gradients(const Context& context, const Tensor& squares_1, const Tensor& loss_1, double max_norm,
                    const Tensor& step_S) {
  TESSERA_DIMS(squares_1, loss_1, step_S);
  TESSERA_CHECK_TENSOR(squares_1, DType::kFloat64, {1});
  if (loss_1.defined()) TESSERA_CHECK_TENSOR(loss_1, DType::kFloat64, {1});
  TESSERA_CHECK_TENSOR(step_S, DType::kFloat32, {AdamWStep::kNumbers});
  TESSERA_RUN(clip_gradients, context, squares_1, loss_1, max_norm, step_S);
}

void adamw(const Context& context, const AdamWOptions& options, const Tensor& step_S, const Tensor& d_w_N,
           const Tensor& m_N, const Tensor& v_N, const Tensor& w_N, const Tensor& shadow_N) {
  const TraceScope trace(context.trace, "adamw");
  check_step(step_S, d_w_N, m_N, v_N, w_N);
  if (shadow_N.defined()) TESSERA_CHECK_TENSOR(shadow_N, DType::kBFloat16, {w_N.dim(0)});
  TESSERA_RUN(adamw, context, options, step_S, d_w_N, m_N, v_N, w_N, shadow_N);
}

void adamw_quantized(const Context& context, const AdamWOptions& options, const Tensor& step_S, const Tensor& d_w_N,
                     const Tensor& m_N, const Tensor& v_N, const Tensor& w, DType compute, const mx::Format& format,
                     const QuantizedWeight& quantized) {
  const TraceScope trace(context.trace, "adamw_quantized");
  check_step(step_S, d_w_N, m_N, v_N, w.reshape({w.num_elements()}));
  check_quantized(quantized, w.shape());
  TESSERA_CHECK(!quantized.rows.defined() || quantized.rows.format == format);
  TESSERA_CHECK(!quantized.columns.defined() || quantized.columns.format == format);
  TESSERA_RUN(adamw_quantized, context, options, step_S, d_w_N, m_N, v_N, w, compute, format, quantized);
}

}  // namespace tessera
