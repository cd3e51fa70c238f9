// Compares products of quantized operands with float64 products of the numbers that these stand for.
#include "ops/gemm/quantized_gemm.h"

#include "ops/elementwise/swiglu.h"
#include "ops/norm/rmsnorm.h"
#include "ops/quantize/quantize.h"
#include "ops/routing/permute.h"
#include "tests/ops/harness.h"

namespace tessera {
namespace {

using mx::Format;

/// Returns the bound relative to the largest result. It allows for float32 sums, and for rounding the result to its
/// type.
double bound_of(DType result) { return result == DType::kFloat32 ? 1e-6 : 1.0 / 256.0; }

struct Recipe {
  const char* name;
  Format activation, weight;
};
const Recipe kRecipes[] = {
    {"1x32", {}, {}},
    {"32x32", {}, {.along = 32, .across = 32}},
    {"128x128", {.along = 128}, {.along = 128, .across = 128}},
    {"256x256", {.along = 256}, {.along = 256, .across = 256}},
    {"fp8_blockwise",
     {.scale_type = mx::ScaleType::kFloat32, .along = 128},
     {.scale_type = mx::ScaleType::kFloat32, .along = 128, .across = 128}},
};

class QuantizedGemm : public TypedOperatorTest {
 protected:
  mx::Quantized allocate(Shape shape, const Format& format) {
    return mx::allocate_quantized(shape, format, [&](Shape s, DType type) { return arena_.allocate(s, type); });
  }
  GemmOperand operand(const Tensor& x, const Format& format) {
    GemmOperand result;
    result.rows = allocate({x.dim(0), x.dim(1)}, format);
    result.columns = allocate({x.dim(1), x.dim(0)}, format);
    quantize(context(), x, result.rows, result.columns);
    return result;
  }
  QuantizedWeight weight(const Tensor& w, const Format& format) {
    QuantizedWeight result;
    result.rows = allocate(w.shape(), format);
    if (!format.square()) {
      result.columns = allocate(mx::transposed(w.shape()), format);
    }
    quantize(context(), w, result.rows, result.columns);
    return result;
  }
  /// Returns the exact numbers that q stands for.
  Doubles values(const mx::Quantized& q) {
    const ArenaScope scope(arena_);
    const Tensor wide = arena_.allocate(q.elements.shape(), DType::kFloat32);
    dequantize(context(), q, wide);
    Doubles result = doubles(wide);
    if (q.format.scale_type == mx::ScaleType::kE8M0) return result;
    // The product of an element and a float32 scale needs more digits than float32 has.
    const std::int64_t k = q.elements.dim(q.elements.num_dims() - 1), m = q.elements.dim(q.elements.num_dims() - 2);
    const std::int64_t per_row = q.scales.dim(q.scales.num_dims() - 1), rows = q.scales.dim(q.scales.num_dims() - 2);
    for (std::int64_t i = 0; i < q.elements.num_elements(); ++i) {
      const std::int64_t row = i / k % m / q.format.scale_height() + i / (k * m) * rows;
      result[static_cast<std::size_t>(i)] =
          static_cast<double>(mx::value_of<mx::E4M3>(q.element_bytes()[i])) *
          static_cast<double>(q.scales.data<float>()[row * per_row + i % k / q.format.scale_width()]);
    }
    return result;
  }
  /// Returns a [m, k] · b [n, k]ᵀ.
  static Doubles product(const Doubles& a, const Doubles& b, std::size_t m, std::size_t n, std::size_t k) {
    Doubles c(m * n, 0.0);
    for (std::size_t i = 0; i < m; ++i) {
      for (std::size_t j = 0; j < n; ++j) {
        for (std::size_t l = 0; l < k; ++l) c[i * n + j] += a[i * k + l] * b[j * k + l];
      }
    }
    return c;
  }
  static Doubles transpose(const Doubles& x, std::size_t m, std::size_t n) {
    Doubles result(x.size());
    for (std::size_t i = 0; i < m; ++i) {
      for (std::size_t j = 0; j < n; ++j) result[j * m + i] = x[i * n + j];
    }
    return result;
  }
  /// Returns the weight [m, n] as the gradient of the input reads it, [n, m].
  Doubles transposed_values(const QuantizedWeight& w, std::size_t m, std::size_t n) {
    return w.columns.defined() ? values(w.columns) : transpose(values(w.rows), m, n);
  }
};

TEST_P(QuantizedGemm, IsTheProductOfTheNumbers) {
  for (const Recipe& recipe : kRecipes) {
    for (const auto& [tokens, m, n] : {std::tuple{64, 96, 160}, {160, 128, 256}, {33, 31, 65}}) {
      SCOPED_TRACE(fmt::format("{} {} {} {}", recipe.name, tokens, m, n));
      const ArenaScope scope(arena_);
      const auto t = static_cast<std::size_t>(tokens), um = static_cast<std::size_t>(m),
                 un = static_cast<std::size_t>(n);
      const Tensor x = randoms({tokens, n}), w = randoms({m, n}, 0.1), d_y = randoms({tokens, m}, 1e-3);
      const GemmOperand qx = operand(x, recipe.activation), q_dy = operand(d_y, recipe.activation);
      const QuantizedWeight qw = weight(w, recipe.weight);
      EXPECT_EQ(qw.columns.defined(), !recipe.weight.square());
      const Tensor y = randoms({tokens, m}), d_x = randoms({tokens, n}), d_w = random({m, n});

      linear_forward(context(), qx.rows, qw, y);
      EXPECT_LE(relative_error(y, product(values(qx.rows), values(qw.rows), t, um, un)), bound_of(dtype()));
      linear_dgrad(context(), q_dy.rows, qw, d_x);
      const Doubles d_x_expected = product(values(q_dy.rows), transposed_values(qw, um, un), t, un, um);
      EXPECT_LE(relative_error(d_x, d_x_expected), bound_of(dtype()));
      const Doubles before = doubles(d_x);
      linear_dgrad(context(), q_dy.rows, qw, d_x, Write::kAccumulate);
      EXPECT_LE(relative_error(d_x, plus(before, d_x_expected)), bound_of(dtype()));
      const Doubles d_w_before = doubles(d_w);
      linear_wgrad(context(), q_dy.columns, qx.columns, d_w);
      EXPECT_LE(relative_error(d_w, plus(d_w_before, product(values(q_dy.columns), values(qx.columns), um, un, t))),
                bound_of(DType::kFloat32));
    }
  }
}

TEST_P(QuantizedGemm, GroupedIsTheProductOfTheNumbers) {
  for (const Recipe& recipe : kRecipes) {
    for (const std::vector<std::int32_t>& blocks : {std::vector<std::int32_t>{2, 0, 1, 3}, {0, 0}, {0, 5}, {1}}) {
      SCOPED_TRACE(fmt::format("{} {}", recipe.name, fmt::join(blocks, " ")));
      const ArenaScope scope(arena_);
      const auto experts = static_cast<std::int64_t>(blocks.size());
      constexpr std::int64_t kM = 96, kN = 160;
      std::vector<std::int32_t> offsets = {0};
      for (const std::int32_t count : blocks) offsets.push_back(offsets.back() + count * recipe.activation.along);
      const std::int64_t used = offsets.back(), rows = used + recipe.activation.along;
      const Tensor offsets_E1 = ints(offsets);
      const Tensor x = randoms({rows, kN}), w = randoms({experts, kM, kN}, 0.1), d_y = randoms({rows, kM});
      const GemmOperand qx = operand(x, recipe.activation), q_dy = operand(d_y, recipe.activation);
      const QuantizedWeight qw = weight(w, recipe.weight);
      const Tensor y = randoms({rows, kM}), d_x = randoms({rows, kN}), d_w = random({experts, kM, kN});
      Doubles d_w_expected = doubles(d_w);
      grouped_linear_forward(context(), qx.rows, qw, offsets_E1, y);
      grouped_linear_dgrad(context(), q_dy.rows, qw, offsets_E1, d_x);
      grouped_linear_wgrad(context(), q_dy.columns, qx.columns, offsets_E1, d_w);
      for (std::int64_t e = 0; e < experts; ++e) {
        const std::int64_t first = offsets[static_cast<std::size_t>(e)];
        const std::int64_t last = offsets[static_cast<std::size_t>(e) + 1];
        if (first == last) continue;
        const auto count = static_cast<std::size_t>(last - first);
        const auto part = [&](const Doubles& all, std::int64_t from, std::int64_t to, std::int64_t width) {
          return Doubles(all.begin() + from * width, all.begin() + to * width);
        };
        const auto along = [&](const mx::Quantized& q) {  // columns of the group's rows
          Doubles result;
          const Doubles all = values(q);
          for (std::int64_t i = 0; i < q.elements.dim(0); ++i) {
            result.insert(result.end(), all.begin() + i * rows + first, all.begin() + i * rows + last);
          }
          return result;
        };
        QuantizedWeight we;
        we.rows = qw.rows[e];
        if (qw.columns.defined()) we.columns = qw.columns[e];
        EXPECT_LE(relative_error(part(doubles(y), first, last, kM),
                                 product(part(values(qx.rows), first, last, kN), values(we.rows), count, kM, kN)),
                  bound_of(dtype()));
        EXPECT_LE(
            relative_error(part(doubles(d_x), first, last, kN), product(part(values(q_dy.rows), first, last, kM),
                                                                        transposed_values(we, kM, kN), count, kN, kM)),
            bound_of(dtype()));
        const Doubles gradient = product(along(q_dy.columns), along(qx.columns), kM, kN, count);
        for (std::size_t i = 0; i < gradient.size(); ++i)
          d_w_expected[static_cast<std::size_t>(e * kM * kN) + i] += gradient[i];
      }
      EXPECT_LE(relative_error(d_w, d_w_expected), bound_of(DType::kFloat32));
    }
  }
}

TEST_P(QuantizedGemm, GroupsThatCutABlockThrow) {
  const GemmOperand x = operand(randoms({96, 32}), {});
  const Tensor d_w = random({2, 32, 32});
  EXPECT_THROW(grouped_linear_wgrad(context(), x.columns, x.columns, ints({0, 33, 96}), d_w), InternalError);
}

// A block with NaN makes its rows of the product NaN, and no other rows.
TEST_P(QuantizedGemm, NaNStaysInItsRow) {
  const Tensor x = randoms({64, 64}), y = randoms({64, 32});
  if (dtype() == DType::kFloat32) {
    x.data<float>()[5 * 64 + 3] = HUGE_VALF;
  } else {
    x.data<BFloat16>()[5 * 64 + 3] = BFloat16(HUGE_VALF);
  }
  linear_forward(context(), operand(x, {}).rows, weight(randoms({32, 64}), {}), y);
  const Doubles result = doubles(y);
  for (std::size_t i = 0; i < result.size(); ++i) EXPECT_EQ(std::isnan(result[i]), i / 32 == 5) << i;
}

/// Compares the forms of a matrix that a fused operator writes with those of quantizing its plain output.
class FusedQuantize : public QuantizedGemm {
 protected:
  void expect_fused(std::int64_t num_rows, std::int64_t length,
                    const std::function<void(const GemmOperand& y)>& produce, std::int64_t computed = -1) {
    const Tensor plain = randoms({num_rows, length});
    produce(plain);
    for (const bool with_plain : {false, true}) {
      for (const Format& format : {Format{}, Format{.along = 128}}) {
        const ArenaScope scope(arena_);
        const std::int64_t rows = computed < 0 ? num_rows : computed;
        GemmOperand fused;
        if (with_plain) fused.plain = randoms({num_rows, length});
        fused.rows = allocate({num_rows, length}, format);
        fused.columns = allocate({length, num_rows}, format);
        produce(fused);
        const GemmOperand apart = operand(plain.rows(0, rows), format);
        EXPECT_EQ(doubles(fused.rows.elements.rows(0, rows)), doubles(apart.rows.elements));
        EXPECT_EQ(doubles(fused.rows.scales.rows(0, rows)), doubles(apart.rows.scales));
        EXPECT_EQ(doubles(fused.columns.elements.columns(0, rows)), doubles(apart.columns.elements));
        EXPECT_EQ(doubles(fused.columns.scales.columns(0, apart.columns.scales.dim(1))), doubles(apart.columns.scales));
        if (with_plain) {
          EXPECT_EQ(doubles(fused.plain.rows(0, rows)), doubles(plain.rows(0, rows)));
        }
      }
    }
  }
};

TEST_P(FusedQuantize, RmsNorm) {
  const Tensor x = randoms({300, 96}), delta = randoms({300, 96}), w = randoms({96}), rstd = random({300});
  expect_fused(300, 96, [&](const GemmOperand& y) { rmsnorm_forward(context(), x, w, 1e-5f, y, rstd); });
  const Tensor sum = randoms({300, 96});
  expect_fused(300, 96,
               [&](const GemmOperand& y) { residual_rmsnorm_forward(context(), x, delta, w, 1e-5f, sum, y, rstd); });
}

TEST_P(FusedQuantize, SwiGlu) {
  const Tensor h = randoms({200, 192}, 3.0), d_a = randoms({200, 96});
  expect_fused(200, 96, [&](const GemmOperand& a) { swiglu_forward(context(), h, a); });
  expect_fused(
      200, 96, [&](const GemmOperand& a) { swiglu_forward(context(), h, a, ints({160})); }, 160);
  expect_fused(200, 192, [&](const GemmOperand& d_h) { swiglu_backward(context(), d_a, h, d_h, randoms({200, 96})); });
  expect_fused(200, 96, [&](const GemmOperand& a) { swiglu_backward(context(), d_a, h, randoms({200, 192}), a); });
}

TEST_P(FusedQuantize, RoutedRows) {
  const Tensor weights = random({256}), d_weights = random({256});
  std::vector<std::int32_t> slot_of_row(256, -1);
  for (std::size_t i = 0; i < 160; ++i) slot_of_row[i + i / 60 * 4] = static_cast<std::int32_t>(i * 7 % 160);
  const Tensor slots = ints(slot_of_row), used = ints({192});
  const Tensor h = randoms({256, 128}, 3.0), d_a = randoms({256, 64}), x = randoms({40, 64});
  expect_fused(
      256, 64, [&](const GemmOperand& y) { gather_rows(context(), x, slots, 4, used, y); }, 192);
  const auto backward = [&](const GemmOperand& d_h, const GemmOperand& a) {
    swiglu_backward_weighted(context(), d_a, h, weights, used, d_h, a, d_weights);
  };
  expect_fused(
      256, 128,
      [&](const GemmOperand& d_h) {
        backward(d_h, randoms({256, 64}));
      },
      192);
  expect_fused(
      256, 64,
      [&](const GemmOperand& a) {
        backward(randoms({256, 128}), a);
      },
      192);
}

// Layers call the operator so if the weight's gradient is in high precision: plain results overwrite the inputs, and
// quantized results are written, too.
TEST_P(FusedQuantize, SwiGluInPlace) {
  const Tensor h = randoms({200, 192}, 3.0), d_a = randoms({200, 96});
  const Tensor d_h_apart = randoms({200, 192}), a_apart = randoms({200, 96});
  swiglu_backward(context(), d_a, h, d_h_apart, a_apart);
  const GemmOperand d_h_expected = operand(d_h_apart, {}), a_expected = operand(a_apart, {});
  GemmOperand d_h = operand(h, {}), a = operand(d_a, {});
  d_h.plain = h;
  a.plain = d_a;
  swiglu_backward(context(), d_a, h, d_h, a);
  for (const auto& [actual, plain, expected] :
       {std::tuple{d_h, d_h_apart, d_h_expected}, std::tuple{a, a_apart, a_expected}}) {
    EXPECT_EQ(doubles(actual.plain), doubles(plain));
    EXPECT_EQ(doubles(actual.rows.elements), doubles(expected.rows.elements));
    EXPECT_EQ(doubles(actual.rows.scales), doubles(expected.rows.scales));
    EXPECT_EQ(doubles(actual.columns.elements), doubles(expected.columns.elements));
    EXPECT_EQ(doubles(actual.columns.scales), doubles(expected.columns.scales));
  }
}

TESSERA_BOTH_TYPES(QuantizedGemm);
TESSERA_BOTH_TYPES(FusedQuantize);

}  // namespace
}  // namespace tessera
