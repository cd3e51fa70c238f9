// Elementwise operators on float32 and bfloat16.
#pragma once

#include "ops/runtime/context.h"

namespace tessera {

/// target = source, converted; the same shape, either strided. To bfloat16: round to nearest even.
void convert(const Context& context, const Tensor& source, const Tensor& target);

/// sum = a + b in float32, rounded once; `sum` may be `a` or `b`. a and sum have one type; b is that or float32.
void add(const Context& context, const Tensor& a, const Tensor& b, const Tensor& sum);

/// sum_1 (float64, [1]) += the sum of x_N (float32), in float64, in an order that depends on N only.
void add_sum(const Context& context, const Tensor& x_N, const Tensor& sum_1);

/// sum_N (float64) += x_N (int32).
void add_counts(const Context& context, const Tensor& x_N, const Tensor& sum_N);

/// target = source, byte by byte. Any type, the same in both.
void copy(const Context& context, const Tensor& source, const Tensor& target);

/// target = 0. Any type.
void set_zero(const Context& context, const Tensor& target);

/// True if no element is infinite or NaN; strided.
bool all_finite(const Context& context, const Tensor& x);

}  // namespace tessera
