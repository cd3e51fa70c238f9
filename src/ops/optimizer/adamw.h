// AdamW (Loshchilov and Hutter, arXiv 1711.05101), and clipping by the global gradient norm.
//
// Numbers that change from step to step are read from a tensor. So a step that was captured as a graph can be replayed:
//   1. The host writes adamw_step(...) to step_S.
//   2. sum_of_squares computes squares_1.
//   3. clip_gradients updates step_S from it.
//   4. adamw reads step_S.
#pragma once

#include <cstddef>
#include <limits>

#include "ops/kit/gemm_operand.h"
#include "ops/runtime/context.h"

namespace tessera {

/// Holds the options that do not change during a run.
struct AdamWOptions {
  float beta1, beta2, epsilon;
  float weight_decay;
};

/// Holds the numbers of a step, in the layout of the tensor step_S (float32, [kNumbers]).
struct AdamWStep {
  float learning_rate;
  float correction1, correction2;  // factors 1 / (1 - β^step), which correct the moments' bias
  float largest_loss = std::numeric_limits<float>::infinity();  // a step whose loss sum is larger is skipped
  float gradient_scale = 1.0f;                                  // factor of all gradients
  float finite = 1.0f;  // 0: this step and all following ones are skipped until the host writes 1

  static constexpr std::int64_t kNumbers = 6;
  /// The number of leading values that the host writes anew for every step.
  static constexpr std::int64_t kNumbersOfHost = 4;
  static constexpr std::int64_t kFinite = 5;
  /// Returns the number `finite` of step_S as a tensor [1].
  static Tensor finite_1(const Tensor& step_S) { return step_S.rows(kFinite, kFinite + 1); }
};
static_assert(sizeof(AdamWStep) == AdamWStep::kNumbers * sizeof(float));
static_assert(offsetof(AdamWStep, finite) == AdamWStep::kFinite * sizeof(float));

/// Returns the numbers of step `step`, counted from 1, without clipping.
AdamWStep adamw_step(const AdamWOptions& options, float learning_rate, std::int64_t step);

/// Assigns the sum of squares of x_N (float32) to squares_1 (float64, [1]). It sums in float64, in an order that
/// depends on N only and, on a GPU, on whether x_N is aligned to 16 bytes.
void sum_of_squares(const Context& context, const Tensor& x_N, const Tensor& squares_1);

/// This is added to a norm before something is divided by it.
inline constexpr double kNormFloor = 1e-6;

/// Sets two numbers of step_S. gradient_scale = min(1, max_norm / (norm + kNormFloor)), with norm = sqrt(squares_1).
/// `finite` becomes 0 in these cases, and otherwise stays as it was:
/// - The norm is not finite.
/// - loss_1 (float64, [1]) is not finite or is larger than largest_loss. An undefined loss_1 is not checked.
void clip_gradients(const Context& context, const Tensor& squares_1, const Tensor& loss_1, double max_norm,
                    const Tensor& step_S);

/// Makes one step over N numbers. Tensors are float32, except for the shadow and, as an option, the moments m and v.
/// Both moments may be bfloat16, as in DeepSeek-V3 (arXiv 2412.19437, 3.3.2). Then w is computed from the new moments
/// before these are rounded.
///   g = d_w · gradient_scale;  m = β1·m + (1-β1)·g;  v = β2·v + (1-β2)·g²;
///   w = w · (1 - lr·decay) - lr · (m · correction1) / (sqrt(v · correction2) + ε).
/// shadow_N (bfloat16) receives w, rounded. It may be undefined. If `finite` is 0, nothing changes.
void adamw(const Context& context, const AdamWOptions& options, const Tensor& step_S, const Tensor& d_w_N,
           const Tensor& m_N, const Tensor& v_N, const Tensor& w_N, const Tensor& shadow_N);

/// Makes the same step over the N numbers of a weight w, [O, K] or [E, O, K], and then renews its quantized form. It
/// quantizes w as rounded to `compute`, float32 or bfloat16.
void adamw_quantized(const Context& context, const AdamWOptions& options, const Tensor& step_S, const Tensor& d_w_N,
                     const Tensor& m_N, const Tensor& v_N, const Tensor& w, DType compute, const mx::Format& format,
                     const QuantizedWeight& quantized);

}  // namespace tessera
