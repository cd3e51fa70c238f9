#include "ops/gemm/grouped_gemm.h"

#include "ops/kit/checks.h"
#include "ops/runtime/backends.h"
#include "tensor/dims.h"

namespace tessera {

TESSERA_BACKENDS(grouped_linear_forward)
TESSERA_BACKENDS(grouped_linear_dgrad)
TESSERA_BACKENDS(grouped_linear_wgrad)

void grouped_linear_forward(const Context& context, const Tensor& x_RN, const Tensor& w_EMN, const Tensor& offsets_E1,
                            const Tensor& y_RM) {
  const TraceScope trace(context.trace, "grouped_gemm.forward");
  TESSERA_DIMS(x_RN, w_EMN, offsets_E1, y_RM);
  const std::int64_t experts = w_EMN.dim(0), m = w_EMN.dim(1), n = w_EMN.dim(2), num_rows = x_RN.dim(0);
  TESSERA_CHECK_TENSOR(x_RN, x_RN.dtype(), {num_rows, n});
  TESSERA_CHECK_TENSOR(w_EMN, x_RN.dtype(), {experts, m, n});
  TESSERA_CHECK_TENSOR(offsets_E1, DType::kInt32, {experts + 1});
  TESSERA_CHECK_TENSOR(y_RM, x_RN.dtype(), {num_rows, m});
  TESSERA_RUN(grouped_linear_forward, context, x_RN, w_EMN, offsets_E1, y_RM);
}

void grouped_linear_dgrad(const Context& context, const Tensor& d_y_RM, const Tensor& w_EMN, const Tensor& offsets_E1,
                          const Tensor& d_x_RN) {
  const TraceScope trace(context.trace, "grouped_gemm.dgrad");
  TESSERA_DIMS(d_y_RM, w_EMN, offsets_E1, d_x_RN);
  const std::int64_t experts = w_EMN.dim(0), m = w_EMN.dim(1), n = w_EMN.dim(2), num_rows = d_y_RM.dim(0);
  TESSERA_CHECK_TENSOR(d_y_RM, d_y_RM.dtype(), {num_rows, m});
  TESSERA_CHECK_TENSOR(w_EMN, d_y_RM.dtype(), {experts, m, n});
  TESSERA_CHECK_TENSOR(offsets_E1, DType::kInt32, {experts + 1});
  TESSERA_CHECK_TENSOR(d_x_RN, d_y_RM.dtype(), {num_rows, n});
  TESSERA_RUN(grouped_linear_dgrad, context, d_y_RM, w_EMN, offsets_E1, d_x_RN);
}

void grouped_linear_wgrad(const Context& context, const Tensor& d_y_RM, const Tensor& x_RN, const Tensor& offsets_E1,
                          const Tensor& d_w_EMN, Write write) {
  const TraceScope trace(context.trace, "grouped_gemm.wgrad");
  TESSERA_DIMS(d_y_RM, x_RN, offsets_E1, d_w_EMN);
  const std::int64_t experts = d_w_EMN.dim(0), m = d_w_EMN.dim(1), n = d_w_EMN.dim(2), num_rows = d_y_RM.dim(0);
  TESSERA_CHECK_TENSOR(d_y_RM, d_y_RM.dtype(), {num_rows, m});
  TESSERA_CHECK_TENSOR(x_RN, d_y_RM.dtype(), {num_rows, n});
  TESSERA_CHECK_TENSOR(offsets_E1, DType::kInt32, {experts + 1});
  TESSERA_CHECK_TENSOR(d_w_EMN, DType::kFloat32, {experts, m, n});
  TESSERA_RUN(grouped_linear_wgrad, context, d_y_RM, x_RN, offsets_E1, d_w_EMN, write);
}

}  // namespace tessera
