#include "ops/cpu/gemm.h"
#include "ops/cpu/grouped.h"
#include "ops/elementwise/elementwise.h"
#include "ops/gemm/quantized_gemm.h"
#include "ops/quantize/quantize.h"

namespace tessera::cpu {
namespace {

/// Assigns or adds to c the product a · bᵀ, or a · b without transpose_b.
void multiply(const Context& context, const mx::Quantized& a, const mx::Quantized& b, bool transpose_b, const Tensor& c,
              Write write) {
  const ArenaScope scope(*context.arena);
  const DType dtype = wide_type(a);
  const Tensor a_wide = widened(context, a, dtype), b_wide = widened(context, b, dtype);
  const Shape expected = {a_wide.dim(0), b_wide.dim(transpose_b ? 0 : 1)};
  TESSERA_CHECK(b_wide.dim(transpose_b ? 1 : 0) == a_wide.dim(1) && c.shape() == expected, "a {} b {} c {}",
                a_wide.shape().to_string(), b_wide.shape().to_string(), c.shape().to_string());
  cpu::gemm(context, a_wide, false, b_wide, transpose_b, c, write);
}

/// Computes y rows = x rows · w_eᵀ, or x rows · w_e without transpose_w.
void multiply_grouped(const Context& context, const mx::Quantized& x, const mx::Quantized& w, bool transpose_w,
                      const Tensor& offsets_E1, const Tensor& y) {
  const ArenaScope scope(*context.arena);
  const DType dtype = wide_type(x);
  const Tensor x_wide = widened(context, x, dtype), w_wide = widened(context, w, dtype);
  const auto product = transpose_w ? GroupedKind::kForward : GroupedKind::kDgrad;
  run_grouped_gemm(context, product, x_wide, w_wide, offsets_E1, y);
}

}  // namespace

WeightForm weight_form(const Context&, const Shape&, const mx::Format& format, DType) {
  return format.square() ? WeightForm::kRows : WeightForm::kRowsAndColumns;
}

void linear_forward(const Context& context, const mx::Quantized& x_TN, const QuantizedWeight& w_MN, const Tensor& y_TM,
                    Write write) {
  multiply(context, x_TN, w_MN.rows, true, y_TM, write);
}

void linear_dgrad(const Context& context, const mx::Quantized& d_y_TM, const QuantizedWeight& w_MN,
                  const Tensor& d_x_TN, Write write) {
  const bool transposed = w_MN.columns.defined();
  multiply(context, d_y_TM, transposed ? w_MN.columns : w_MN.rows, transposed, d_x_TN, write);
}

void linear_wgrad(const Context& context, const mx::Quantized& d_y_MT, const mx::Quantized& x_NT, const Tensor& d_w_MN,
                  Write write) {
  multiply(context, d_y_MT, x_NT, true, d_w_MN, write);
}

void grouped_linear_forward(const Context& context, const mx::Quantized& x_RN, const QuantizedWeight& w_EMN,
                            const Tensor& offsets_E1, const Tensor& y_RM) {
  multiply_grouped(context, x_RN, w_EMN.rows, true, offsets_E1, y_RM);
}

void grouped_linear_dgrad(const Context& context, const mx::Quantized& d_y_RM, const QuantizedWeight& w_EMN,
                          const Tensor& offsets_E1, const Tensor& d_x_RN) {
  const bool transposed = w_EMN.columns.defined();
  multiply_grouped(context, d_y_RM, transposed ? w_EMN.columns : w_EMN.rows, transposed, offsets_E1, d_x_RN);
}

void grouped_linear_wgrad(const Context& context, const mx::Quantized& d_y_MR, const mx::Quantized& x_NR,
                          const Tensor& offsets_E1, const Tensor& d_w_EMN, Write write) {
  const std::int64_t experts = d_w_EMN.dim(0);
  const ArenaScope scope(*context.arena);
  const DType dtype = wide_type(x_NR);
  const Tensor d_y = widened(context, d_y_MR, dtype), x = widened(context, x_NR, dtype);
  if (!context.measuring()) {
    const std::int32_t* offsets = offsets_E1.data<std::int32_t>();
    for (std::int64_t e = 0; e <= experts; ++e) {
      TESSERA_CHECK(offsets[e] % x_NR.format.along == 0, "expert {} begins at row {}, blocks have {}", e, offsets[e],
                    x_NR.format.along);
    }
  }
  if (write == Write::kAssign) tessera::set_zero(context, d_w_EMN);
  run_grouped_gemm(context, GroupedKind::kWgradOfColumns, d_y, x, offsets_E1, d_w_EMN);
}

}  // namespace tessera::cpu
