#include "ops/checks.h"
#include "ops/cpu/grouped.h"
#include "ops/cpu/types.h"
#include "ops/grouped_gemm.h"
#include "tensor/parallel.h"

namespace tessera {

void cpu::run_grouped_gemm(const Context& context, GroupedGemm args, DType dtype, std::int64_t columns,
                           const Tensor& offsets_E1) {
  TESSERA_CHECK_TENSOR(offsets_E1, DType::kInt32, {args.num_experts + 1});
  const Element element = element_of(dtype);
  const ThreadScratch scratch(context, kernels().grouped_gemm_scratch(args, element));
  if (context.measuring()) return;
  args.offsets = offsets_E1.data<std::int32_t>();
  const std::int64_t blocks = (columns + kGroupedColumnsPerTask - 1) / kGroupedColumnsPerTask;
  parallel_for(args.num_experts * blocks, [&](std::int64_t task) {
    kernels().grouped_gemm(args, element, task / blocks, task % blocks, scratch.mine());
  });
}

void grouped_linear_forward(const Context& context, const Tensor& x_RN, const Tensor& w_EMN, const Tensor& offsets_E1,
                            const Tensor& y_RM) {
  const TraceScope trace(context.trace, "grouped_gemm.forward");
  const std::int64_t experts = w_EMN.dim(0), m = w_EMN.dim(1), n = w_EMN.dim(2), num_rows = x_RN.dim(0);
  TESSERA_CHECK_TENSOR(x_RN, x_RN.dtype(), {num_rows, n});
  TESSERA_CHECK_TENSOR(w_EMN, x_RN.dtype(), {experts, m, n});
  TESSERA_CHECK_TENSOR(y_RM, x_RN.dtype(), {num_rows, m});
  cpu::run_grouped_gemm(context,
                        {.kind = cpu::GroupedGemm::Kind::kForward,
                         .num_experts = experts,
                         .m = m,
                         .n = n,
                         .num_rows = num_rows,
                         .offsets = nullptr,
                         .x_or_dy = x_RN.raw(),
                         .w_or_x = w_EMN.raw(),
                         .out = y_RM.raw()},
                        x_RN.dtype(), m, offsets_E1);
}

void grouped_linear_dgrad(const Context& context, const Tensor& d_y_RM, const Tensor& w_EMN, const Tensor& offsets_E1,
                          const Tensor& d_x_RN) {
  const TraceScope trace(context.trace, "grouped_gemm.dgrad");
  const std::int64_t experts = w_EMN.dim(0), m = w_EMN.dim(1), n = w_EMN.dim(2), num_rows = d_y_RM.dim(0);
  TESSERA_CHECK_TENSOR(d_y_RM, d_y_RM.dtype(), {num_rows, m});
  TESSERA_CHECK_TENSOR(w_EMN, d_y_RM.dtype(), {experts, m, n});
  TESSERA_CHECK_TENSOR(d_x_RN, d_y_RM.dtype(), {num_rows, n});
  cpu::run_grouped_gemm(context,
                        {.kind = cpu::GroupedGemm::Kind::kDgrad,
                         .num_experts = experts,
                         .m = m,
                         .n = n,
                         .num_rows = num_rows,
                         .offsets = nullptr,
                         .x_or_dy = d_y_RM.raw(),
                         .w_or_x = w_EMN.raw(),
                         .out = d_x_RN.raw()},
                        d_y_RM.dtype(), n, offsets_E1);
}

void grouped_linear_wgrad(const Context& context, const Tensor& d_y_RM, const Tensor& x_RN, const Tensor& offsets_E1,
                          const Tensor& d_w_EMN) {
  const TraceScope trace(context.trace, "grouped_gemm.wgrad");
  const std::int64_t experts = d_w_EMN.dim(0), m = d_w_EMN.dim(1), n = d_w_EMN.dim(2), num_rows = d_y_RM.dim(0);
  TESSERA_CHECK_TENSOR(d_y_RM, d_y_RM.dtype(), {num_rows, m});
  TESSERA_CHECK_TENSOR(x_RN, d_y_RM.dtype(), {num_rows, n});
  TESSERA_CHECK_TENSOR(d_w_EMN, DType::kFloat32, {experts, m, n});
  cpu::run_grouped_gemm(context,
                        {.kind = cpu::GroupedGemm::Kind::kWgrad,
                         .num_experts = experts,
                         .m = m,
                         .n = n,
                         .num_rows = num_rows,
                         .offsets = nullptr,
                         .x_or_dy = d_y_RM.raw(),
                         .w_or_x = x_RN.raw(),
                         .out = d_w_EMN.raw()},
                        d_y_RM.dtype(), n, offsets_E1);
}

}  // namespace tessera
