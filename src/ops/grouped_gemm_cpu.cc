#include "ops/checks.h"
#include "ops/cpu/grouped.h"
#include "ops/cpu/types.h"
#include "ops/grouped_gemm.h"
#include "tensor/parallel.h"

namespace tessera {

void cpu::run_grouped_gemm(const Context& context, GroupedGemm::Kind kind, const Tensor& x_or_dy, const Tensor& w_or_x,
                           const Tensor& offsets_E1, const Tensor& out) {
  using Kind = GroupedGemm::Kind;
  const bool of_columns = kind == Kind::kWgradOfColumns;
  const Tensor& weights = kind == Kind::kWgrad || of_columns ? out : w_or_x;
  GroupedGemm args{.kind = kind,
                   .num_experts = weights.dim(0),
                   .m = weights.dim(1),
                   .n = weights.dim(2),
                   .num_rows = x_or_dy.dim(of_columns ? 1 : 0),
                   .offsets = nullptr,
                   .x_or_dy = x_or_dy.raw(),
                   .w_or_x = w_or_x.raw(),
                   .out = out.raw()};
  TESSERA_CHECK_TENSOR(offsets_E1, DType::kInt32, {args.num_experts + 1});
  const Element element = element_of(x_or_dy.dtype());
  const ThreadScratch scratch(context, kernels().grouped_gemm_scratch(args, element));
  if (context.measuring()) return;
  args.offsets = offsets_E1.data<std::int32_t>();
  const std::int64_t columns = kind == Kind::kForward ? args.m : args.n;
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
  cpu::run_grouped_gemm(context, cpu::GroupedGemm::Kind::kForward, x_RN, w_EMN, offsets_E1, y_RM);
}

void grouped_linear_dgrad(const Context& context, const Tensor& d_y_RM, const Tensor& w_EMN, const Tensor& offsets_E1,
                          const Tensor& d_x_RN) {
  const TraceScope trace(context.trace, "grouped_gemm.dgrad");
  const std::int64_t experts = w_EMN.dim(0), m = w_EMN.dim(1), n = w_EMN.dim(2), num_rows = d_y_RM.dim(0);
  TESSERA_CHECK_TENSOR(d_y_RM, d_y_RM.dtype(), {num_rows, m});
  TESSERA_CHECK_TENSOR(w_EMN, d_y_RM.dtype(), {experts, m, n});
  TESSERA_CHECK_TENSOR(d_x_RN, d_y_RM.dtype(), {num_rows, n});
  cpu::run_grouped_gemm(context, cpu::GroupedGemm::Kind::kDgrad, d_y_RM, w_EMN, offsets_E1, d_x_RN);
}

void grouped_linear_wgrad(const Context& context, const Tensor& d_y_RM, const Tensor& x_RN, const Tensor& offsets_E1,
                          const Tensor& d_w_EMN) {
  const TraceScope trace(context.trace, "grouped_gemm.wgrad");
  const std::int64_t experts = d_w_EMN.dim(0), m = d_w_EMN.dim(1), n = d_w_EMN.dim(2), num_rows = d_y_RM.dim(0);
  TESSERA_CHECK_TENSOR(d_y_RM, d_y_RM.dtype(), {num_rows, m});
  TESSERA_CHECK_TENSOR(x_RN, d_y_RM.dtype(), {num_rows, n});
  TESSERA_CHECK_TENSOR(d_w_EMN, DType::kFloat32, {experts, m, n});
  cpu::run_grouped_gemm(context, cpu::GroupedGemm::Kind::kWgrad, d_y_RM, x_RN, offsets_E1, d_w_EMN);
}

}  // namespace tessera
