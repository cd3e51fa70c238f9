#include "ops/norm/rmsnorm.h"

#include "ops/kit/checks.h"
#include "ops/runtime/backends.h"
#include "tensor/dims.h"

namespace tessera {

TESSERA_BACKENDS(rmsnorm_forward)
TESSERA_BACKENDS(residual_rmsnorm_forward)
TESSERA_BACKENDS(rmsnorm_backward)

void rmsnorm_forward(const Context& context, const Tensor& x_TN, const Tensor& w_N, float eps, const GemmOperand& y_TN,
                     const Tensor& rstd_T) {
  const TraceScope trace(context.trace, "rmsnorm.forward");
  TESSERA_DIMS(x_TN, w_N, y_TN, rstd_T);
  const std::int64_t num_rows = x_TN.dim(0), length = x_TN.dim(1);
  TESSERA_CHECK_TENSOR(w_N, x_TN.dtype(), {length});
  TESSERA_CHECK_TENSOR(rstd_T, DType::kFloat32, {num_rows});
  check_operand(y_TN, num_rows, length, x_TN.dtype());
  TESSERA_RUN(rmsnorm_forward, context, x_TN, w_N, eps, y_TN, rstd_T);
}

void residual_rmsnorm_forward(const Context& context, const Tensor& x_TN, const Tensor& delta_TN, const Tensor& w_N,
                              float eps, const Tensor& sum_TN, const GemmOperand& y_TN, const Tensor& rstd_T) {
  const TraceScope trace(context.trace, "rmsnorm.forward");
  TESSERA_DIMS(x_TN, delta_TN, w_N, sum_TN, y_TN, rstd_T);
  const std::int64_t num_rows = x_TN.dim(0), length = x_TN.dim(1);
  const DType dtype = x_TN.dtype();
  TESSERA_CHECK_TENSOR(x_TN, dtype, {num_rows, length});
  TESSERA_CHECK_TENSOR(delta_TN, dtype, {num_rows, length});
  TESSERA_CHECK_TENSOR(w_N, dtype, {length});
  TESSERA_CHECK_TENSOR(sum_TN, dtype, {num_rows, length});
  TESSERA_CHECK_TENSOR(rstd_T, DType::kFloat32, {num_rows});
  check_operand(y_TN, num_rows, length, dtype);
  TESSERA_RUN(residual_rmsnorm_forward, context, x_TN, delta_TN, w_N, eps, sum_TN, y_TN, rstd_T);
}

void rmsnorm_backward(const Context& context, const Tensor& d_y_TN, const Tensor& x_TN, const Tensor& w_N,
                      const Tensor& rstd_T, const Tensor& d_x_TN, Write write_d_x, const Tensor& d_w_N) {
  const TraceScope trace(context.trace, "rmsnorm.backward");
  TESSERA_DIMS(d_y_TN, x_TN, w_N, rstd_T, d_x_TN, d_w_N);
  const std::int64_t num_rows = x_TN.dim(0), length = x_TN.dim(1);
  const DType dtype = x_TN.dtype();
  TESSERA_CHECK_TENSOR(d_y_TN, dtype, {num_rows, length});
  TESSERA_CHECK_TENSOR(w_N, dtype, {length});
  TESSERA_CHECK_TENSOR(rstd_T, DType::kFloat32, {num_rows});
  TESSERA_CHECK_STRIDED(d_x_TN, dtype, {num_rows, length});
  TESSERA_CHECK_TENSOR(d_w_N, DType::kFloat32, {length});
  TESSERA_RUN(rmsnorm_backward, context, d_y_TN, x_TN, w_N, rstd_T, d_x_TN, write_d_x, d_w_N);
}

}  // namespace tessera
