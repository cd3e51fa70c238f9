#include "ops/elementwise/swiglu.h"
#include "ops/quantize/quantize.h"
#include "tests/ops/parity.h"
#include "tests/ops/quantize/quantize_inputs.h"

namespace tessera {
namespace {

class SwiGluCuda : public ParityTest {
 protected:
  GemmOperand operand(const Shape& shape, DType dtype, const mx::Format& format) {
    GemmOperand x(poisoned(shape, dtype));
    x.rows = poisoned(shape, format);
    x.columns = poisoned(mx::transposed(shape), format);
    return x;
  }
  static std::vector<Tensor> parts(const GemmOperand& x) {
    return {x.plain, x.rows.elements, x.rows.scales, x.columns.elements, x.columns.scales};
  }
  static void append(std::vector<Tensor>& all, const std::vector<Tensor>& more) {
    all.insert(all.end(), more.begin(), more.end());
  }

  /// Expects the quantized forms to be those of the first rows of the plain form.
  void expect_quantized(const GemmOperand& x, std::int64_t num_rows) {
    const ArenaScope scope(arena_);
    const mx::Format& format = x.rows.format;
    const Tensor plain = x.plain.rows(0, num_rows);
    const mx::Quantized rows = poisoned(plain.shape(), format),
                        columns = poisoned(mx::transposed(plain.shape()), format);
    quantize(context(), plain, rows, columns);
    EXPECT_EQ(doubles(x.rows.elements.rows(0, num_rows)), doubles(rows.elements));
    EXPECT_EQ(doubles(x.rows.scales.rows(0, rows.scales.dim(0))), doubles(rows.scales));
    EXPECT_EQ(doubles(x.columns.elements.columns(0, num_rows)), doubles(columns.elements));
    EXPECT_EQ(doubles(x.columns.scales.columns(0, columns.scales.dim(1))), doubles(columns.scales));
  }
};

// The widths are one number, widths that are not in lanes or not whole tiles, and the experts' width.
constexpr std::int64_t kSwigluWidths[] = {1, 45, 96, 200, 1408};

TEST_F(SwiGluCuda, Forward) {
  for (const DType dtype : kActivationTypes) {
    for (const std::int64_t width : kSwigluWidths) {
      const ArenaScope scope(arena_);
      const Tensor h = random({300, 2 * width}, dtype, 8.0), a = poisoned({300, width}, dtype);
      expect_close([&](const Side& side) { swiglu_forward(side.op, side(h), side(a)); }, {a});
      const Tensor num_rows_1 = ints({137});
      expect_close([&](const Side& side) { swiglu_forward(side.op, side(h), side(a), side(num_rows_1)); },
                   {a.rows(0, 137)});
    }
  }
}

TEST_F(SwiGluCuda, ForwardOfAllMagnitudes) {
  // The bound is relative to the largest number of a tensor, so each magnitude has one of its own.
  for (const double scale : {1e-6, 1e-3, 1.0, 20.0, 200.0}) {
    const Tensor h = random({64, 2 * 64}, DType::kFloat32, scale), a = poisoned({64, 64}, DType::kFloat32);
    expect_close([&](const Side& side) { swiglu_forward(side.op, side(h), side(a)); }, {a});
  }
}

TEST_F(SwiGluCuda, Backward) {
  for (const DType dtype : kActivationTypes) {
    for (const std::int64_t width : kSwigluWidths) {
      const ArenaScope scope(arena_);
      const Tensor h = random({300, 2 * width}, dtype, 8.0), d_a = random({300, width}, dtype);
      const Tensor d_h = poisoned(h.shape(), dtype), a = poisoned(d_a.shape(), dtype);
      expect_close([&](const Side& side) { swiglu_backward(side.op, side(d_a), side(h), side(d_h), side(a)); },
                   {d_h, a}, kBackwardBound);
      expect_close([&](const Side& side) { swiglu_backward(side.op, side(d_a), side(h), side(h), side(d_a)); },
                   {h, d_a}, kBackwardBound);
    }
  }
}

TEST_F(SwiGluCuda, BackwardWeighted) {
  for (const DType dtype : kActivationTypes) {
    for (const std::int64_t width : kSwigluWidths) {
      for (const std::int64_t used : {300, 137, 0}) {
        const ArenaScope scope(arena_);
        const Tensor h = random({300, 2 * width}, dtype, 8.0), d_a = random({300, width}, dtype);
        const Tensor weights = random({300}), d_weights = poisoned({300}, DType::kFloat32);
        for (std::int64_t r = 5; r < 300; r += 7) weights.data<float>()[r] = 0.0f;
        const Tensor d_h = poisoned(h.shape(), dtype), a = poisoned(d_a.shape(), dtype);
        const Tensor num_rows_1 = ints({static_cast<std::int32_t>(used)});
        const auto first = [&](const Tensor& x) { return x.rows(0, used); };
        expect_close(
            [&](const Side& side) {
              swiglu_backward_weighted(side.op, side(d_a), side(h), side(weights), side(num_rows_1), side(d_h), side(a),
                                       side(d_weights));
            },
            {first(d_h), first(a), first(d_weights)}, kBackwardBound);
        expect_close(
            [&](const Side& side) {
              swiglu_backward_weighted(side.op, side(d_a), side(h), side(weights), side(num_rows_1), side(h), side(d_a),
                                       side(d_weights));
            },
            {first(h), first(d_a), first(d_weights)}, kBackwardBound);
      }
    }
  }
}

// A width of 96 gives whole blocks of 32, and blocks of 128 that lie in both halves of d_h.
TEST_F(SwiGluCuda, QuantizedOutputs) {
  for (const DType dtype : kActivationTypes) {
    for (const mx::Format& format : all_formats()) {
      // The activations that weights' gradients read have blocks of at most 128.
      mx::Format of_weighted_a = format;
      if (format.along > mx::kWideBlock) of_weighted_a.along = mx::kWideBlock;
      if (format.across > mx::kWideBlock) of_weighted_a.across = mx::kWideBlock;
      for (const std::int64_t width : {45, 96, 256, 640}) {
        for (const std::int64_t used : {300, 137}) {
          SCOPED_TRACE(fmt::format("{} {} {}", name_of(dtype), width, describe(format)));
          const ArenaScope scope(arena_);
          const Tensor h = random({300, 2 * width}, dtype, 8.0), d_a = random({300, width}, dtype);
          const Tensor weights = random({300}), d_weights = poisoned({300}, DType::kFloat32);
          const Tensor num_rows_1 = ints({static_cast<std::int32_t>(used)});
          const GemmOperand a = operand(d_a.shape(), dtype, format);
          const GemmOperand weighted_a = operand(d_a.shape(), dtype, of_weighted_a);
          const GemmOperand d_h = operand(h.shape(), dtype, format);
          std::vector<Tensor> outputs = parts(a);
          append(outputs, parts(weighted_a));
          append(outputs, parts(d_h));
          run_on_gpu(
              [&](const Side& side) {
                swiglu_forward(side.op, side(h), side(a), side(num_rows_1));
                swiglu_backward_weighted(side.op, side(d_a), side(h), side(weights), side(num_rows_1), side(d_h),
                                         side(weighted_a), side(d_weights));
              },
              outputs);
          for (const GemmOperand& x : {a, weighted_a, d_h}) expect_quantized(x, used);
          // Without the plain form the results are the same.
          GemmOperand alone = operand(h.shape(), dtype, format);
          alone.plain = {};
          run_on_gpu(
              [&](const Side& side) {
                swiglu_backward_weighted(side.op, side(d_a), side(h), side(weights), side(num_rows_1), side(alone),
                                         side(weighted_a), side(d_weights));
              },
              {alone.rows.elements, alone.rows.scales, alone.columns.elements, alone.columns.scales});
          alone.plain = d_h.plain;
          expect_quantized(alone, used);
        }
      }
    }
  }
}

}  // namespace
}  // namespace tessera
