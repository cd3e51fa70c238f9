#include "ops/gemm/quantized_gemm.h"
#include "ops/quantize/quantize.h"
#include "tests/gpu_delay.h"
#include "tests/ops/parity.h"

namespace tessera {
namespace {

constexpr mx::Format kExact = {};
constexpr mx::Format kWide = {.along = mx::kWideBlock};
constexpr mx::Format kWideSquare = {.along = mx::kWideBlock, .across = mx::kWideBlock};
constexpr mx::Format kFloatRows = {.scale_type = mx::ScaleType::kFloat32, .along = mx::kWideBlock};
constexpr mx::Format kFloatSquare = {
    .scale_type = mx::ScaleType::kFloat32, .along = mx::kWideBlock, .across = mx::kWideBlock};

constexpr mx::Format kWidest = {.along = mx::kWidestBlock};
constexpr mx::Format kWidestSquare = {.along = mx::kWidestBlock, .across = mx::kWidestBlock};

struct Recipe {
  const char* name;
  mx::Format input, gradient, weight, wgrad_input, wgrad_gradient;
};
constexpr Recipe kRecipes[] = {{"exact", kExact, kExact, kExact, kExact, kExact},
                               {"exact square", kExact, kExact, {.across = 32}, kExact, kExact},
                               {"wide", kWide, kWide, kWide, kWide, kWide},
                               {"wide square", kWide, kWide, kWideSquare, kWideSquare, kWide},
                               {"widest", kWidest, kWidest, kWidestSquare, kWideSquare, kWide},
                               {"widest weight", kWidest, kWide, kWidestSquare, kWideSquare, kWide},
                               {"blockwise", kFloatRows, kFloatRows, kFloatSquare, kFloatRows, kFloatRows},
                               {"blockwise square", kFloatRows, kFloatRows, kFloatSquare, kFloatSquare, kFloatRows}};

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
    DType out;  // type of the products
    mx::Quantized rows, columns;
  };
  Weight weight(const Tensor& w, const mx::Format& format, DType out) {
    return {w, format, out, quantized(w, format, false), quantized(w, format, true)};
  }
  /// Returns the weight in the form that this side reads.
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
           {std::tuple{1, 16, 32}, {129, 144, 272}, {256, 256, 384}, {300, 640, 896}, {160, 96, 416}, {40, 24, 56}}) {
        SCOPED_TRACE(fmt::format("{} {} {} x {} x {}", recipe.name, name_of(out), t, m, n));
        const ArenaScope scope(arena_);
        const Tensor x = random({t, n}), d_y = random({t, m});
        const Weight w = weight(random({m, n}, DType::kFloat32, 0.1), recipe.weight, out);
        const mx::Quantized x_rows = quantized(x, recipe.input, false),
                            d_y_rows = quantized(d_y, recipe.gradient, false),
                            x_columns = quantized(x, recipe.wgrad_input, true),
                            d_y_columns = quantized(d_y, recipe.wgrad_gradient, true);
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
      // The groups are whole blocks, one of them is empty, and rows of NaN follow the last.
      const bool is_wide = recipe.wgrad_gradient.along == mx::kWideBlock;
      const std::vector<std::int32_t> ends = {0, is_wide ? 256 : 32, is_wide ? 256 : 32, is_wide ? 384 : 320, 768};
      const std::int64_t used = 768, rows = 1024;
      SCOPED_TRACE(fmt::format("{} {}", recipe.name, name_of(out)));
      const ArenaScope scope(arena_);
      const Tensor offsets = ints(ends);
      const Tensor x = random({rows, n}), d_y = random({rows, m});
      for (const Tensor& part : {x.rows(used, rows), d_y.rows(used, rows)}) {
        std::memset(part.raw(), 0xff, part.num_bytes());
      }
      const Weight w = weight(random({experts, m, n}, DType::kFloat32, 0.1), recipe.weight, out);
      const mx::Quantized x_rows = quantized(x, recipe.input, false), d_y_rows = quantized(d_y, recipe.gradient, false),
                          x_columns = quantized(x, recipe.wgrad_input, true),
                          d_y_columns = quantized(d_y, recipe.wgrad_gradient, true);
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

// If there are few tiles, clusters share a tile's sums and write their parts one after the other. Kernels that hold SMs
// make some of the clusters start late.
TEST_F(QuantizedGemmCuda, SharedSumsBesideKernelsThatHoldSms) {
  constexpr std::int64_t kRows = 16384;
  constexpr int kRounds = 25, kHeldMicroseconds = 200;
  for (const auto& [format, x_format] : {std::pair{kWide, kWide}, {kWide, kWideSquare}, {kFloatRows, kFloatRows}}) {
    for (const auto& [m, n, ends] : {std::tuple{128, 128, std::vector<std::int32_t>{0, kRows}},
                                     {256, 128, {0, kRows}},
                                     {256, 256, {0, kRows}},
                                     {384, 128, {0, kRows}},
                                     {128, 128, {0, 3072, 3072, 4096, kRows}},
                                     {256, 256, {0, 12288, kRows}}}) {
      SCOPED_TRACE(fmt::format("{} x {}, rows {}", m, n, fmt::join(ends, " ")));
      const ArenaScope scope(arena_);
      const mx::Quantized d_y = quantized(random({kRows, m}, DType::kBFloat16), format, true),
                          x = quantized(random({kRows, n}, DType::kBFloat16), x_format, true);
      const Tensor offsets = ints(ends);
      const Tensor d_w = poisoned({static_cast<std::int64_t>(ends.size()) - 1, m, n}, DType::kFloat32);
      expect_close(
          [&](const Side& s) {
            const mx::Quantized d_ys = s(d_y), xs = s(x);
            const Tensor offset = s(offsets), result = s(d_w);
            if (s.op.target() == Device::kCpu)
              return grouped_linear_wgrad(s.op, d_ys, xs, offset, result, Write::kAssign);
            const cuda::Stream others;
            std::vector<std::byte> first, again(d_w.num_bytes());
            for (int round = 0; round < kRounds; ++round) {
              hold_sms(others, 1 + round * 37 % s.op.cuda->num_sms(), kHeldMicroseconds);
              grouped_linear_wgrad(s.op, d_ys, xs, offset, result, Write::kAssign);
              cuda::copy_bytes(s.op.cuda->stream(), result.raw(), result.num_bytes(), again.data());
              s.op.cuda->synchronize();
              if (round == 0) first = again;
              EXPECT_TRUE(again == first) << "round " << round;
            }
            others.synchronize();
          },
          {d_w}, 1e-3);
    }
  }
}

}  // namespace
}  // namespace tessera
