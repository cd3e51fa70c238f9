#include "ops/cpu/gemm.h"
#include "ops/cpu/grouped.h"
#include "ops/elementwise/elementwise.h"
#include "ops/gemm/grouped_gemm.h"
#include "ops/kit/checks.h"
#include "tensor/parallel.h"

namespace tessera::cpu {

namespace {

/// Returns the product of the expert whose rows are [first, first + num_rows).
Gemm product_of_expert(GroupedKind kind, const Tensor& x_or_dy, const Tensor& w_or_x, const Tensor& out,
                       std::int64_t expert, std::int64_t first, std::int64_t num_rows) {
  const bool of_rows = kind == GroupedKind::kForward || kind == GroupedKind::kDgrad;
  const bool of_columns = kind == GroupedKind::kWgradOfColumns;
  const Tensor& weights = of_rows ? w_or_x : out;
  const std::int64_t m = weights.dim(1), n = weights.dim(2);
  const Element element = element_of(x_or_dy.dtype()), element_out = element_of(out.dtype());
  const std::int64_t left = first * (of_columns ? 1 : x_or_dy.dim(1));
  const std::int64_t right = of_rows ? expert * m * n : first * (of_columns ? 1 : n);
  const std::int64_t columns = kind == GroupedKind::kForward ? m : n;
  return {.m = of_rows ? num_rows : m,
          .n = columns,
          .k = kind == GroupedKind::kForward ? n
               : kind == GroupedKind::kDgrad ? m
                                             : num_rows,
          .a = advance(x_or_dy.raw(), element, left),
          .b = advance(w_or_x.raw(), element, right),
          .c = const_cast<void*>(advance(out.raw(), element_out, of_rows ? first * columns : expert * m * n)),
          .stride_a = x_or_dy.dim(1),
          .stride_b = of_columns ? w_or_x.dim(1) : n,
          .stride_c = columns,
          .transpose_a = kind == GroupedKind::kWgrad,
          .transpose_b = kind == GroupedKind::kForward || of_columns,
          .accumulate = !of_rows,
          .element_a = element,
          .element_b = element,
          .element_c = element_out};
}

}  // namespace

void run_grouped_gemm(const Context& context, GroupedKind kind, const Tensor& x_or_dy, const Tensor& w_or_x,
                      const Tensor& offsets_E1, const Tensor& out) {
  const bool of_rows = kind == GroupedKind::kForward || kind == GroupedKind::kDgrad;
  const std::int64_t num_experts = (of_rows ? w_or_x : out).dim(0);
  const std::int64_t num_rows = x_or_dy.dim(kind == GroupedKind::kWgradOfColumns ? 1 : 0);
  TESSERA_CHECK_TENSOR(offsets_E1, DType::kInt32, {num_experts + 1});
  const Gemm all = product_of_expert(kind, x_or_dy, w_or_x, out, 0, 0, num_rows);
  // The number of an expert's rows is not known in advance, so each part takes all of them.
  GemmParts parts(of_rows ? 1 : all.m, all.n, all.transpose_a, num_experts);
  if (of_rows) parts.rows = all.m;
  const ThreadScratch scratch(context, kernels().gemm_scratch(largest_part(all, parts)));
  if (context.measuring()) return;
  const std::int32_t* offsets = offsets_E1.data<std::int32_t>();
  parallel_for(num_experts * parts.count(), [&](std::int64_t task) {
    const std::int64_t expert = task / parts.count(), first = offsets[expert];
    const std::int64_t count = offsets[expert + 1] - first;
    if (count == 0) return;
    const Gemm product = product_of_expert(kind, x_or_dy, w_or_x, out, expert, first, count);
    kernels().gemm(part_of(product, parts, task % parts.count()), scratch.mine());
  });
}

void grouped_linear_forward(const Context& context, const Tensor& x_RN, const Tensor& w_EMN, const Tensor& offsets_E1,
                            const Tensor& y_RM) {
  run_grouped_gemm(context, GroupedKind::kForward, x_RN, w_EMN, offsets_E1, y_RM);
}

void grouped_linear_dgrad(const Context& context, const Tensor& d_y_RM, const Tensor& w_EMN, const Tensor& offsets_E1,
                          const Tensor& d_x_RN) {
  run_grouped_gemm(context, GroupedKind::kDgrad, d_y_RM, w_EMN, offsets_E1, d_x_RN);
}

void grouped_linear_wgrad(const Context& context, const Tensor& d_y_RM, const Tensor& x_RN, const Tensor& offsets_E1,
                          const Tensor& d_w_EMN, Write write) {
  if (write == Write::kAssign) tessera::set_zero(context, d_w_EMN);
  run_grouped_gemm(context, GroupedKind::kWgrad, d_y_RM, x_RN, offsets_E1, d_w_EMN);
}

}  // namespace tessera::cpu
