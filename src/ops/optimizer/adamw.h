// AdamW (Loshchilov and Hutter, arXiv 1711.05101), and clipping by the global gradient norm.
//
// What changes from step to step is read from a tensor, so that a step that was captured as a graph can be replayed:
//   step_S = adamw_step(...), put there by the host
//   sum_of_squares: squares_1     clip_gradients: step_S from it     adamw: reads step_S
#pragma once

#include <cstddef>
#include <limits>

#include "ops/runtime/context.h"

namespace tessera {

/// The options that do not change during a run.
struct AdamWOptions {
  float beta1, beta2, epsilon;
  float weight_decay;
};

/// A step's numbers as they lie in the tensor step_S (float32, [kNumbers]).
struct AdamWStep {
  float learning_rate;
  float correction1, correction2;                               // of the moments' bias: 1 / (1 - β^step)
  float largest_loss = std::numeric_limits<float>::infinity();  // a step whose loss sum is above it is not made
  float gradient_scale = 1.0f;                                  // gradients are multiplied by this first
  float finite = 1.0f;  // 0: the step is not made, nor is what follows until the host puts 1 here

  static constexpr std::int64_t kNumbers = 6;
  /// The first ones are the host's, which differ from step to step.
  static constexpr std::int64_t kNumbersOfHost = 4;
  static constexpr std::int64_t kFinite = 5;
  /// `finite` of step_S, [1].
  static Tensor finite_1(const Tensor& step_S) { return step_S.rows(kFinite, kFinite + 1); }
};
static_assert(sizeof(AdamWStep) == AdamWStep::kNumbers * sizeof(float));
static_assert(offsetof(AdamWStep, finite) == AdamWStep::kFinite * sizeof(float));

/// Returns the numbers of step `step`, counted from 1, without clipping.
AdamWStep adamw_step(const AdamWOptions& options, float learning_rate, std::int64_t step);

/// squares_1 (float64, [1], =): sum of squares of x_N (float32), in float64 and in an order that depends on N only.
void sum_of_squares(const Context& context, const Tensor& x_N, const Tensor& squares_1);

/// Added to a norm that is divided by.
inline constexpr double kNormFloor = 1e-6;

/// Of step_S: gradient_scale = min(1, max_norm / (norm + kNormFloor)), norm = sqrt(squares_1); finite = 0 unless the
/// norm is finite, and loss_1 (float64, [1]; undefined: not asked) is and is at most largest_loss, and finite was 1.
void clip_gradients(const Context& context, const Tensor& squares_1, const Tensor& loss_1, double max_norm,
                    const Tensor& step_S);

/// One step over N numbers, float32 but for the shadow, and for the moments m and v, which may both be bfloat16 (as
/// DeepSeek-V3's, arXiv 2412.19437, 3.3.2): then the new ones are rounded when w has been computed from them.
///   g = d_w · gradient_scale;  m = β1·m + (1-β1)·g;  v = β2·v + (1-β2)·g²;
///   w = w · (1 - lr·decay) - lr · (m · correction1) / (sqrt(v · correction2) + ε).
/// shadow_N (bfloat16) = w rounded; undefined: none. A step that is not finite changes nothing.
void adamw(const Context& context, const AdamWOptions& options, const Tensor& step_S, const Tensor& d_w_N,
           const Tensor& m_N, const Tensor& v_N, const Tensor& w_N, const Tensor& shadow_N);

}  // namespace tessera
