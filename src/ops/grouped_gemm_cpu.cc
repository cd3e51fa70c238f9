#include "ops/checks.h"
#include "ops/cpu/grouped.h"
#include "ops/cpu/types.h"
#include "ops/elementwise.h"
#include "ops/grouped_gemm.h"
#include "tensor/parallel.h"

namespace tessera::cpu {

void run_grouped_gemm(const Context& context, GroupedGemm::Kind kind, const Tensor& x_or_dy, const Tensor& w_or_x,
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
  run_grouped_gemm(context, GroupedGemm::Kind::kForward, x_RN, w_EMN, offsets_E1, y_RM);
}

void grouped_linear_dgrad(const Context& context, const Tensor& d_y_RM, const Tensor& w_EMN, const Tensor& offsets_E1,
                          const Tensor& d_x_RN) {
  run_grouped_gemm(context, GroupedGemm::Kind::kDgrad, d_y_RM, w_EMN, offsets_E1, d_x_RN);
}

void grouped_linear_wgrad(const Context& context, const Tensor& d_y_RM, const Tensor& x_RN, const Tensor& offsets_E1,
                          const Tensor& d_w_EMN, Write write) {
  if (write == Write::kAssign) tessera::set_zero(context, d_w_EMN);
  run_grouped_gemm(context, GroupedGemm::Kind::kWgrad, d_y_RM, x_RN, offsets_E1, d_w_EMN);
}

}  // namespace tessera::cpu
