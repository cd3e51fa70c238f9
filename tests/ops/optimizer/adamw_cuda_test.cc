#include "ops/optimizer/adamw.h"
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
