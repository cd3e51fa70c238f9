#include "ops/quantize.h"
#include "ops/quantized_gemm.h"
#include "tests/ops/parity.h"

namespace tessera {
namespace {

constexpr mx::Format kExact = {};
constexpr mx::Format kWide = {.along = mx::kWideBlock};
constexpr mx::Format kWideSquare = {.along = mx::kWideBlock, .across = mx::kWideBlock};
constexpr mx::Format kFloatRows = {.scale_type = mx::ScaleType::kFloat32, .along = mx::kWideBlock};
constexpr mx::Format kFloatSquare = {
    .scale_type = mx::ScaleType::kFloat32, .along = mx::kWideBlock, .across = mx::kWideBlock};

struct Recipe {
  const char* name;
  mx::Format activation, weight;
};
constexpr Recipe kRecipes[] = {{"exact", kExact, kExact},
                               {"exact square", kExact, {.across = 32}},
                               {"wide", kWide, kWide},
                               {"wide square", kWide, kWideSquare},
                               {"blockwise", kFloatRows, kFloatSquare}};

class QuantizedGemmCuda : public ParityTest {
 protected:
  mx::Quantized quantized(const Tensor& x, const mx::Format& format, bool columns) {
    const mx::Quantized q = poisoned(columns ? mx::transposed(x.shape()) : x.shape(), format);
    quantize(context(), x, columns ? mx::Quantized() : q, columns ? q : mx::Quantized());
    return q;
  }
  struct Weight {
    Tensor plain;
    mx::Format format;
    DType out;  // of products
    mx::Quantized rows, columns;
  };
  Weight weight(const Tensor& w, const mx::Format& format, DType out) {
    return {w, format, out, quantized(w, format, false), quantized(w, format, true)};
  }
  /// In the form that this side reads.
  static QuantizedWeight on(const Side& side, const Weight& w) {
    const WeightForm form = weight_form(side.op, w.plain.shape(), w.format, w.out);
    if (form != WeightForm::kWide) return {side(w.rows), side(w.columns), {}, {}};
    const QuantizedWeight wide = allocate_weight(form, w.plain.shape(), w.format, [&](const Shape& shape, DType dtype) {
      return side.op.arena->allocate(shape, dtype);
    });
    quantize_weight(side.op, side(w.plain), w.format, wide);
    return wide;
  }
};

TEST_F(QuantizedGemmCuda, Dense) {
  for (const Recipe& recipe : kRecipes) {
    for (const DType out : {DType::kBFloat16, DType::kFloat32}) {
      for (const auto& [t, m, n] :
           {std::tuple{1, 16, 32}, {129, 144, 272}, {256, 256, 384}, {160, 96, 416}, {40, 24, 56}}) {
        SCOPED_TRACE(fmt::format("{} {} {} x {} x {}", recipe.name, name_of(out), t, m, n));
        const Tensor x = random({t, n}), d_y = random({t, m});
        const Weight w = weight(random({m, n}, DType::kFloat32, 0.1), recipe.weight, out);
        const mx::Quantized x_rows = quantized(x, recipe.activation, false),
                            d_y_rows = quantized(d_y, recipe.activation, false),
                            x_columns = quantized(x, recipe.activation, true),
                            d_y_columns = quantized(d_y, recipe.activation, true);
        for (const Write write : {Write::kAssign, Write::kAccumulate}) {
          const bool assigns = write == Write::kAssign;
          const Tensor y = assigns ? poisoned({t, m}, out) : random({t, m}, out);
          const Tensor d_x = assigns ? poisoned({t, n}, out) : random({t, n}, out);
          expect_close([&](const Side& s) { linear_forward(s.op, s(x_rows), on(s, w), s(y), write); }, {y}, 1e-4);
          expect_close([&](const Side& s) { linear_dgrad(s.op, s(d_y_rows), on(s, w), s(d_x), write); }, {d_x}, 1e-4);
          const Tensor d_w = assigns ? poisoned({m, n}, DType::kFloat32) : random({m, n});
          expect_close([&](const Side& s) { linear_wgrad(s.op, s(d_y_columns), s(x_columns), s(d_w), write); }, {d_w},
                       1e-3);
        }
      }
    }
  }
}

TEST_F(QuantizedGemmCuda, Grouped) {
  for (const Recipe& recipe : kRecipes) {
    for (const DType out : {DType::kBFloat16, DType::kFloat32}) {
      const std::int64_t m = 144, n = 272, experts = 4;
      // Groups of whole blocks, an empty one, and rows of NaN behind the last.
      const bool is_wide = recipe.activation.along == mx::kWideBlock;
      const std::vector<std::int32_t> ends = {0, is_wide ? 256 : 32, is_wide ? 256 : 32, is_wide ? 384 : 320, 768};
      const std::int64_t used = 768, rows = 1024;
      SCOPED_TRACE(fmt::format("{} {}", recipe.name, name_of(out)));
      const Tensor offsets = ints(ends);
      const Tensor x = random({rows, n}), d_y = random({rows, m});
      for (const Tensor& part : {x.rows(used, rows), d_y.rows(used, rows)}) {
        std::memset(part.raw(), 0xff, part.num_bytes());
      }
      const Weight w = weight(random({experts, m, n}, DType::kFloat32, 0.1), recipe.weight, out);
      const mx::Quantized x_rows = quantized(x, recipe.activation, false),
                          d_y_rows = quantized(d_y, recipe.activation, false),
                          x_columns = quantized(x, recipe.activation, true),
                          d_y_columns = quantized(d_y, recipe.activation, true);
      const Tensor y = poisoned({rows, m}, out), d_x = poisoned({rows, n}, out);
      expect_close([&](const Side& s) { grouped_linear_forward(s.op, s(x_rows), on(s, w), s(offsets), s(y)); },
                   {y.rows(0, used)}, 1e-4);
      expect_close([&](const Side& s) { grouped_linear_dgrad(s.op, s(d_y_rows), on(s, w), s(offsets), s(d_x)); },
                   {d_x.rows(0, used)}, 1e-4);
      for (const Write write : {Write::kAssign, Write::kAccumulate}) {
        const Shape shape{experts, m, n};
        const Tensor d_w = write == Write::kAssign ? poisoned(shape, DType::kFloat32) : random(shape);
        expect_close(
            [&](const Side& s) { grouped_linear_wgrad(s.op, s(d_y_columns), s(x_columns), s(offsets), s(d_w), write); },
            {d_w}, 1e-3);
      }
    }
  }
}

}  // namespace
}  // namespace tessera
