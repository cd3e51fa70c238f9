// Elementwise operators on float32 and bfloat16.
#pragma once

#include "ops/runtime/context.h"

namespace tessera {

/// Converts source to target. They have the same shape, and both may be strided. Conversion to bfloat16 rounds to
/// nearest even.
void convert(const Context& context, const Tensor& source, const Tensor& target);

/// Computes sum = a + b or, if c is defined, a + (b + c), in float32, and rounds once. `sum` may be one of the
/// operands. a, c and sum have one type. b has the same type or float32.
void add(const Context& context, const Tensor& a, const Tensor& b, const Tensor& sum, const Tensor& c = {});

/// Adds the sum of x_N (float32) to sum_1 (float64, [1]). It sums in float64, in an order that depends on N only.
void add_sum(const Context& context, const Tensor& x_N, const Tensor& sum_1);

/// Adds x_N (int32) to sum_N (float64).
void add_counts(const Context& context, const Tensor& x_N, const Tensor& sum_N);

/// Copies source to target byte by byte. Both have the same type, which may be any.
void copy(const Context& context, const Tensor& source, const Tensor& target);

/// Sets target to 0. Its type may be any.
void set_zero(const Context& context, const Tensor& target);

/// Returns whether no element of x is infinite or NaN. x may be strided. Returns true while measuring.
bool all_finite(const Context& context, const Tensor& x);

}  // namespace tessera
