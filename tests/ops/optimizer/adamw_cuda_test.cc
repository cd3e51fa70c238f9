#include "ops/elementwise/elementwise.h"
#include "ops/optimizer/adamw.h"
#include "ops/quantize/quantize.h"
#include "tests/ops/parity.h"

namespace tessera {
namespace {

constexpr AdamWOptions kOptions{.beta1 = 0.9f, .beta2 = 0.95f, .epsilon = 1e-8f, .weight_decay = 0.1f};

class AdamWCuda : public ParityTest {
 protected:
  Tensor step_numbers(std::int64_t step) {
    const AdamWStep numbers = adamw_step(kOptions, 0.01f, step);
    const Tensor step_S = arena_.allocate({AdamWStep::kNumbers}, DType::kFloat32);
    std::memcpy(step_S.raw(), &numbers, sizeof numbers);
    return step_S;
  }
  Tensor number(double value) {
    const Tensor tensor = arena_.allocate({1}, DType::kFloat64);
    tensor.data<double>()[0] = value;
    return tensor;
  }
};

TEST_F(AdamWCuda, Steps) {
  for (const std::int64_t size : {1, 9, 70'001, 70'004, 1 << 20}) {
    for (const auto& [has_shadow, moments] :
         {std::pair{false, DType::kFloat32}, {true, DType::kFloat32}, {true, DType::kBFloat16}}) {
      const ArenaScope scope(arena_);
      const Tensor g = random({size}), w = random({size}), m = random({size}, moments), v = random({size}, moments);
      for (std::int64_t i = 0; i < size; ++i) {
        if (moments == DType::kFloat32) {
          v.data<float>()[i] = std::abs(v.data<float>()[i]);
        } else {
          v.data<BFloat16>()[i].bits &= 0x7fff;
        }
      }
      const Tensor shadow = has_shadow ? poisoned({size}, DType::kBFloat16) : Tensor();
      const Tensor step_S = step_numbers(3);
      reinterpret_cast<AdamWStep*>(step_S.raw())->gradient_scale = 0.37f;
      std::vector<Tensor> outputs{m, v, w};
      if (has_shadow) outputs.push_back(shadow);
      expect_close(
          [&](const Side& side) {
            adamw(side.op, kOptions, side(step_S), side(g), side(m), side(v), side(w), side(shadow));
          },
          outputs, 1e-6);
    }
  }
}

// The second shape is a stack. Rows of the last one do not start at multiples of 16 bytes.
TEST_F(AdamWCuda, QuantizesTheNewWeight) {
  const mx::Format exact{}, square{.along = 128, .across = 128}, widest{.along = 256, .across = 256},
      blockwise{.scale_type = mx::ScaleType::kFloat32, .along = 128, .across = 128};
  for (const auto& [form, format] : {std::pair{WeightForm::kRowsAndColumns, exact},
                                     {WeightForm::kWide, exact},
                                     {WeightForm::kRowsAndColumns, square},
                                     {WeightForm::kRowsAndColumns, widest},
                                     {WeightForm::kRowsAndColumns, blockwise}}) {
    for (const Shape& shape : {Shape{130, 144}, {3, 128, 272}, {2, 400, 640}, {40, 36}}) {
      for (const auto& [moments, counts] :
           {std::pair{DType::kFloat32, true}, {DType::kBFloat16, true}, {DType::kFloat32, false}}) {
        SCOPED_TRACE(fmt::format("form {}, blocks of {} x {}, {}, {}", static_cast<int>(form), format.across,
                                 format.along, shape.to_string(), name_of(moments)));
        const ArenaScope scope(arena_);
        const std::int64_t size = shape.num_elements();
        const Tensor g = random({size}), w = random(shape), m = random({size}, moments), v = random({size}, moments);
        set_zero(context(), v);
        const Tensor shadow = poisoned(shape, DType::kBFloat16), step_S = step_numbers(3);
        convert(context(), w, shadow);
        if (!counts) reinterpret_cast<AdamWStep*>(step_S.raw())->finite = 0.0f;
        const Doubles before = doubles(w);
        const auto forms = [&, form = form, format = format] {
          return allocate_weight(form, shape, format,
                                 [&](const Shape& part, DType dtype) { return poisoned(part, dtype); });
        };
        const QuantizedWeight together = forms(), apart = forms();
        const auto tensors_of = [](const QuantizedWeight& x) {
          std::vector<Tensor> tensors;
          for (const Tensor& tensor :
               {x.rows.elements, x.rows.scales, x.columns.elements, x.columns.scales, x.wide_rows, x.wide_columns}) {
            if (tensor.defined()) tensors.push_back(tensor);
          }
          return tensors;
        };
        const std::vector<Tensor> of_together = tensors_of(together), of_apart = tensors_of(apart);
        std::vector<Tensor> outputs = of_together;
        outputs.insert(outputs.end(), of_apart.begin(), of_apart.end());
        outputs.push_back(w);
        run_on_gpu(
            [&, format = format](const Side& side) {
              const auto on = [&](const QuantizedWeight& x) {
                return QuantizedWeight{side(x.rows), side(x.columns), side(x.wide_rows), side(x.wide_columns)};
              };
              adamw_quantized(side.op, kOptions, side(step_S), side(g), side(m), side(v), side(w), DType::kBFloat16,
                              format, on(together));
              convert(side.op, side(w), side(shadow));
              quantize_weight(side.op, side(shadow), format, on(apart));
            },
            outputs);
        EXPECT_EQ(doubles(w) == before, !counts);
        for (std::size_t i = 0; i < of_together.size(); ++i) {
          EXPECT_EQ(std::memcmp(of_together[i].raw(), of_apart[i].raw(), of_apart[i].num_bytes()), 0) << i;
        }
      }
    }
  }
}

TEST_F(AdamWCuda, StepsOfAQuantizedWeight) {
  const mx::Format format{.along = 128, .across = 128};
  for (const Shape& shape : {Shape{130, 144}, {3, 128, 272}}) {
    for (const DType moments : {DType::kFloat32, DType::kBFloat16}) {
      const ArenaScope scope(arena_);
      const std::int64_t size = shape.num_elements();
      const Tensor g = random({size}), w = random(shape), m = random({size}, moments), v = random({size}, moments);
      set_zero(context(), v);
      const Tensor step_S = step_numbers(3);
      reinterpret_cast<AdamWStep*>(step_S.raw())->gradient_scale = 0.37f;
      const mx::Quantized rows = poisoned(shape, format), columns = poisoned(mx::transposed(shape), format);
      expect_close(
          [&](const Side& side) {
            adamw_quantized(side.op, kOptions, side(step_S), side(g), side(m), side(v), side(w), DType::kBFloat16,
                            format, {side(rows), side(columns), {}, {}});
          },
          {m, v, w}, 1e-6);
    }
  }
}

TEST_F(AdamWCuda, SumOfSquares) {
  for (const std::int64_t size : {1, 9, 70'003, 3 << 20}) {
    const ArenaScope scope(arena_);
    const Tensor x = random({size}), squares_1 = poisoned({1}, DType::kFloat64);
    expect_close([&](const Side& side) { sum_of_squares(side.op, side(x), side(squares_1)); }, {squares_1}, 1e-12);
  }
}

TEST_F(AdamWCuda, ClippingAndStepsThatAreNotFinite) {
  for (const auto& [squares, loss] : {std::pair{16.0, 1.0},
                                      {0.25, 1.0},
                                      {0.0, 1.0},
                                      {NAN, 1.0},
                                      {HUGE_VAL, 1.0},
                                      {1.0, NAN},
                                      {1.0, HUGE_VAL},
                                      {1.0, 9.0}}) {
    for (const bool has_loss : {false, true}) {
      const ArenaScope scope(arena_);
      const Tensor g = random({77}), m = random({77}), v = random({77}, DType::kFloat32, 0.0), w = random({77});
      const Tensor step_S = step_numbers(1), squares_1 = number(squares), loss_1 = has_loss ? number(loss) : Tensor();
      reinterpret_cast<AdamWStep*>(step_S.raw())->largest_loss = 8.0f;
      const Doubles before = doubles(w);
      expect_close(
          [&](const Side& side) {
            clip_gradients(side.op, side(squares_1), side(loss_1), 1.0, side(step_S));
            adamw(side.op, kOptions, side(step_S), side(g), side(m), side(v), side(w), {});
          },
          {m, v, w}, 1e-6);
      EXPECT_EQ(doubles(w) == before, !std::isfinite(squares) || (has_loss && !(loss <= 8.0)));
      if (std::isfinite(squares)) {
        expect_same(
            [&](const Side& side) { clip_gradients(side.op, side(squares_1), side(loss_1), 1.0, side(step_S)); },
            {step_S});
      }
    }
  }
}

}  // namespace
}  // namespace tessera
