// AdamW (Loshchilov and Hutter, arXiv 1711.05101), and the global gradient norm that clipping needs.
#pragma once

#include "ops/context.h"

namespace tessera {

struct AdamWOptions {
  float learning_rate;
  float beta1, beta2, epsilon;
  float weight_decay;
  std::int64_t step;     // from 1; for the bias correction
  float gradient_scale;  // gradients are multiplied by this first (clipping)
};

/// One step over N numbers, all float32 but the shadow:
///   g = d_w · gradient_scale;  m = β1·m + (1-β1)·g;  v = β2·v + (1-β2)·g²;
///   w = w · (1 - lr·decay) - lr · (m / (1-β1^step)) / (sqrt(v / (1-β2^step)) + ε).
/// shadow_N (bfloat16) = w rounded; undefined: none.
void adamw(const Context& context, const AdamWOptions& options, const Tensor& d_w_N, const Tensor& m_N,
           const Tensor& v_N, const Tensor& w_N, const Tensor& shadow_N);

/// Sum of squares of x_N (float32), in float64 and in an order that depends on N only.
double sum_of_squares(const Context& context, const Tensor& x_N);

}  // namespace tessera
