#include "ops/elementwise/swiglu.h"

#include "ops/kit/checks.h"
#include "ops/runtime/backends.h"
#include "tensor/dims.h"

namespace tessera {

TESSERA_BACKENDS(swiglu_forward)
TESSERA_BACKENDS(swiglu_backward)
TESSERA_BACKENDS(swiglu_backward_weighted)

namespace {

void check_backward(const Tensor& d_a_RF, const Tensor& h_R2F, const GemmOperand& d_h_R2F, const GemmOperand& a_RF) {
  const std::int64_t num_rows = d_a_RF.dim(0), width = d_a_RF.dim(1);
  TESSERA_CHECK_TENSOR(d_a_RF, h_R2F.dtype(), {num_rows, width});
  TESSERA_CHECK_TENSOR(h_R2F, h_R2F.dtype(), {num_rows, 2 * width});
  check_operand(d_h_R2F, num_rows, 2 * width, h_R2F.dtype());
  check_operand(a_RF, num_rows, width, h_R2F.dtype());
}

}  // namespace

void swiglu_forward(const Context& context, const Tensor& h_R2F, const GemmOperand& a_RF, const Tensor& num_rows_1) {
  const TraceScope trace(context.trace, "swiglu.forward");
  TESSERA_DIMS(h_R2F, a_RF, num_rows_1);
  const std::int64_t num_rows = h_R2F.dim(0), width = h_R2F.dim(1) / 2;
  TESSERA_CHECK_TENSOR(h_R2F, h_R2F.dtype(), {num_rows, 2 * width});
  if (num_rows_1.defined()) TESSERA_CHECK_TENSOR(num_rows_1, DType::kInt32, {1});
  check_operand(a_RF, num_rows, width, h_R2F.dtype());
  TESSERA_RUN(swiglu_forward, context, h_R2F, a_RF, num_rows_1);
}

void swiglu_backward(const Context& context, const Tensor& d_a_RF, const Tensor& h_R2F, const GemmOperand& d_h_R2F,
                     const GemmOperand& a_RF) {
  const TraceScope trace(context.trace, "swiglu.backward");
  TESSERA_DIMS(d_a_RF, h_R2F, d_h_R2F, a_RF);
  check_backward(d_a_RF, h_R2F, d_h_R2F, a_RF);
  TESSERA_RUN(swiglu_backward, context, d_a_RF, h_R2F, d_h_R2F, a_RF);
}

void swiglu_backward_weighted(const Context& context, const Tensor& d_a_RF, const Tensor& h_R2F,
                              const Tensor& weights_R, const Tensor& num_rows_1, const GemmOperand& d_h_R2F,
                              const GemmOperand& weighted_a_RF, const Tensor& d_weights_R) {
  const TraceScope trace(context.trace, "swiglu.backward");
  TESSERA_DIMS(d_a_RF, h_R2F, weights_R, num_rows_1, d_h_R2F, weighted_a_RF, d_weights_R);
  check_backward(d_a_RF, h_R2F, d_h_R2F, weighted_a_RF);
  TESSERA_CHECK_TENSOR(num_rows_1, DType::kInt32, {1});
  TESSERA_CHECK_TENSOR(weights_R, DType::kFloat32, {h_R2F.dim(0)});
  TESSERA_CHECK_TENSOR(d_weights_R, DType::kFloat32, {h_R2F.dim(0)});
  TESSERA_RUN(swiglu_backward_weighted, context, d_a_RF, h_R2F, weights_R, num_rows_1, d_h_R2F, weighted_a_RF,
              d_weights_R);
}

}  // namespace tessera
