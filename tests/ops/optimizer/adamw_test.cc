#include "ops/optimizer/adamw.h"

#include "ops/elementwise/elementwise.h"
#include "ops/quantize/quantize.h"
#include "tests/ops/harness.h"

namespace tessera {
namespace {

constexpr AdamWOptions kOptions{.beta1 = 0.9f, .beta2 = 0.95f, .epsilon = 1e-8f, .weight_decay = 0.1f};
constexpr double kRate = 0.01, kGradientScale = 0.5;  // learning rate, and the factor of gradients

class AdamW : public OperatorTest {
 protected:
  void put_step(AdamWStep step, float gradient_scale) {
    step.gradient_scale = gradient_scale;
    std::memcpy(step_S_.raw(), &step, sizeof step);
  }
  AdamWStep step() const { return *reinterpret_cast<const AdamWStep*>(step_S_.data<float>()); }
  /// Computes a step of the formula in float64, with kOptions, kRate, and gradients times kGradientScale.
  static void make_reference_step(int step, const Doubles& gradient, Doubles& m, Doubles& v, Doubles& w) {
    const double beta1 = 0.9, beta2 = 0.95, epsilon = 1e-8, decay = 0.1;
    for (std::size_t i = 0; i < gradient.size(); ++i) {
      const double scaled = gradient[i] * kGradientScale;
      m[i] = beta1 * m[i] + (1 - beta1) * scaled;
      v[i] = beta2 * v[i] + (1 - beta2) * scaled * scaled;
      w[i] = w[i] * (1 - kRate * decay) -
             kRate * (m[i] / (1 - std::pow(beta1, step))) / (std::sqrt(v[i] / (1 - std::pow(beta2, step))) + epsilon);
    }
  }
  Tensor number(double value) {
    const Tensor tensor = arena_.allocate({1}, DType::kFloat64);
    tensor.data<double>()[0] = value;
    return tensor;
  }

  Tensor step_S_ = arena_.allocate({AdamWStep::kNumbers}, DType::kFloat32);
};

TEST_F(AdamW, ThreeStepsAgainstTheFormula) {
  constexpr std::int64_t kSize = 40'000;  // more numbers than a task has
  const Tensor w = random({kSize}), m = random({kSize}), v = random({kSize});
  const Tensor shadow = random({kSize}, DType::kBFloat16);
  std::fill_n(m.data<float>(), kSize, 0.0f);
  std::fill_n(v.data<float>(), kSize, 0.0f);
  Doubles w_ref = doubles(w), m_ref(kSize, 0.0), v_ref(kSize, 0.0);
  for (int step = 1; step <= 3; ++step) {
    const Tensor g = random({kSize});
    put_step(adamw_step(kOptions, static_cast<float>(kRate), step), static_cast<float>(kGradientScale));
    adamw(context(), kOptions, step_S_, g, m, v, w, shadow);
    make_reference_step(step, doubles(g), m_ref, v_ref, w_ref);
  }
  EXPECT_LE(relative_error(w, w_ref), 1e-6);
  EXPECT_LE(relative_error(m, m_ref), 1e-6);
  EXPECT_LE(relative_error(v, v_ref), 1e-6);
  for (std::int64_t i = 0; i < kSize; ++i) {
    ASSERT_EQ(shadow.data<BFloat16>()[i].bits, BFloat16(w.data<float>()[i]).bits);
  }
}

TEST_F(AdamW, AQuantizedWeightIsRenewed) {
  const mx::Format format{.along = 128, .across = 128};
  for (const DType compute : {DType::kBFloat16, DType::kFloat32}) {
    const bool has_shadow = compute == DType::kBFloat16;
    const Shape shape{2, 96, 160};
    const std::int64_t size = shape.num_elements();
    const Tensor g = random({size}), w = random(shape), w_N = random({size}), m = random({size}), v = random({size});
    set_zero(context(), v);
    copy(context(), w.reshape({size}), w_N);
    const Tensor m_N = random({size}), v_N = random({size}), none;
    copy(context(), m, m_N);
    copy(context(), v, v_N);
    const Tensor shadow_N = has_shadow ? random({size}, DType::kBFloat16) : none;
    const auto quantized = [&] {
      return allocate_weight(WeightForm::kRowsAndColumns, shape, format,
                             [&](const Shape& part, DType dtype) { return arena_.allocate(part, dtype); });
    };
    const QuantizedWeight together = quantized(), apart = quantized();
    put_step(adamw_step(kOptions, static_cast<float>(kRate), 2), static_cast<float>(kGradientScale));
    adamw_quantized(context(), kOptions, step_S_, g, m, v, w, compute, format, together);
    adamw(context(), kOptions, step_S_, g, m_N, v_N, w_N, shadow_N);
    quantize_weight(context(), (has_shadow ? shadow_N : w_N).reshape(shape), format, apart);
    EXPECT_EQ(doubles(w), doubles(w_N));
    EXPECT_EQ(doubles(m), doubles(m_N));
    EXPECT_EQ(doubles(v), doubles(v_N));
    for (const auto& [a, b] : {std::pair{together.rows, apart.rows}, {together.columns, apart.columns}}) {
      EXPECT_EQ(std::memcmp(a.elements.raw(), b.elements.raw(), b.elements.num_bytes()), 0);
      EXPECT_EQ(std::memcmp(a.scales.raw(), b.scales.raw(), b.scales.num_bytes()), 0);
    }
  }
}

TEST_F(AdamW, AQuantizedWeightOfAnotherFormatThrows) {
  const Shape shape{2, 96, 160};
  const std::int64_t size = shape.num_elements();
  const Tensor g = random({size}), m = random({size}), v = random({size}), w = random(shape);
  const auto quantized = allocate_weight(WeightForm::kRowsAndColumns, shape, mx::Format{.along = 128, .across = 128},
                                         [&](const Shape& part, DType dtype) { return arena_.allocate(part, dtype); });
  put_step(adamw_step(kOptions, static_cast<float>(kRate), 2), static_cast<float>(kGradientScale));
  EXPECT_THROW(adamw_quantized(context(), kOptions, step_S_, g, m, v, w, DType::kBFloat16, mx::Format{}, quantized),
               InternalError);
}

// Stored moments are rounded. The step of the weights is not.
TEST_F(AdamW, MomentsInBfloat16) {
  constexpr std::int64_t kSize = 40'000;
  const Tensor w = random({kSize}), m = random({kSize}, DType::kBFloat16), v = random({kSize}, DType::kBFloat16);
  for (std::int64_t i = 0; i < kSize; ++i) {
    BFloat16& v_i = v.data<BFloat16>()[i];
    v_i = BFloat16(std::abs(static_cast<float>(v_i)));
  }
  for (int step = 4; step <= 6; ++step) {
    const Tensor g = random({kSize});
    Doubles m_ref = doubles(m), v_ref = doubles(v), w_ref = doubles(w);
    make_reference_step(step, doubles(g), m_ref, v_ref, w_ref);
    put_step(adamw_step(kOptions, static_cast<float>(kRate), step), static_cast<float>(kGradientScale));
    adamw(context(), kOptions, step_S_, g, m, v, w, {});
    const Doubles m_new = doubles(m), v_new = doubles(v);
    for (std::size_t i = 0; i < kSize; ++i) {
      // Numbers are rounded to nearest, unless the float32 sum is on the other side of the middle.
      ASSERT_NEAR(m_new[i], m_ref[i], 0x1.01p-8 * std::abs(m_ref[i]) + 1e-7) << i;
      ASSERT_NEAR(v_new[i], v_ref[i], 0x1.01p-8 * std::abs(v_ref[i]) + 1e-7) << i;
    }
    EXPECT_LE(relative_error(w, w_ref), 1e-6) << step;
  }
}

// Without gradients, moments fade and weights decay. Without a shadow, nothing is rounded.
TEST_F(AdamW, NoGradientAndNoShadow) {
  const Tensor g = random({5}, DType::kFloat32, 0.0), m = random({5}, DType::kFloat32, 0.0),
               v = random({5}, DType::kFloat32, 0.0);
  const Tensor w = random({5});
  Doubles expected = doubles(w);
  for (double& value : expected) value *= 1.0 - 0.5 * 0.1;
  put_step(adamw_step(kOptions, 0.5f, 1), 1.0f);
  adamw(context(), kOptions, step_S_, g, m, v, w, {});
  EXPECT_LE(relative_error(w, expected), 1e-6);
  EXPECT_EQ(doubles(m), Doubles(5, 0.0));
}

TEST_F(AdamW, SumOfSquares) {
  for (const std::int64_t size : {1, 9, 70'003}) {
    const Tensor x = random({size});
    const Doubles values = doubles(x);
    const Tensor squares_1 = arena_.allocate({1}, DType::kFloat64);
    sum_of_squares(context(), x, squares_1);
    EXPECT_NEAR(squares_1.data<double>()[0], dot(values, values), 1e-12 * dot(values, values));
    expect_same_for_any_threads([&] { sum_of_squares(context(), x, squares_1); }, {squares_1});
  }
}

TEST_F(AdamW, ClipsByTheNorm) {
  put_step(adamw_step(kOptions, 0.5f, 1), 1.0f);
  clip_gradients(context(), number(16.0), {}, 1.0, step_S_);
  EXPECT_FLOAT_EQ(step().gradient_scale, 0.25f);
  clip_gradients(context(), number(0.25), number(3.0), 1.0, step_S_);
  EXPECT_EQ(step().gradient_scale, 1.0f);
  EXPECT_EQ(step().finite, 1.0f);
  EXPECT_EQ(step().learning_rate, 0.5f);
}

TEST_F(AdamW, ALossAboveTheLargestIsNoStep) {
  for (const auto& [loss, finite] : {std::pair{2.0, 1.0f}, {2.5, 1.0f}, {2.75, 0.0f}, {1e300, 0.0f}}) {
    AdamWStep numbers = adamw_step(kOptions, 0.5f, 1);
    numbers.largest_loss = 2.5f;
    put_step(numbers, 1.0f);
    clip_gradients(context(), number(1.0), number(loss), 1.0, step_S_);
    EXPECT_EQ(step().finite, finite) << loss;
  }
}

TEST_F(AdamW, StepThatIsNotFiniteChangesNothing) {
  const Tensor g = random({9}), m = random({9}), v = random({9}), w = random({9});
  const Doubles before[] = {doubles(m), doubles(v), doubles(w)};
  for (const auto& [squares, loss] : {std::pair{NAN, 1.0}, {HUGE_VAL, 1.0}, {1.0, NAN}, {1.0, -HUGE_VAL}}) {
    put_step(adamw_step(kOptions, 0.5f, 1), 1.0f);
    clip_gradients(context(), number(squares), number(loss), 1.0, step_S_);
    adamw(context(), kOptions, step_S_, g, m, v, w, {});
    EXPECT_EQ(doubles(m), before[0]);
    EXPECT_EQ(doubles(v), before[1]);
    EXPECT_EQ(doubles(w), before[2]);
  }
}

}  // namespace
}  // namespace tessera
