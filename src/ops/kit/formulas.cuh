// Formulas of a layer that training's kernels and decoding's share. So both compute the same bits from the same
// numbers.
#pragma once

#include "ops/kit/ptx.cuh"

namespace tessera::cuda {

/// RMSNorm: returns the factor of a row of `length` numbers whose squares have this sum.
__device__ inline float rstd_of(float squares, std::int64_t length, float eps) {
  return 1.0f / sqrtf(squares / static_cast<float>(length) + eps);
}

/// Returns 1 / (1 + 2^(-x · log2 e)). Denormal numbers have no effect on the result.
__device__ inline float sigmoid(float x) { return ptx::reciprocal_approx(1.0f + ptx::exp2_approx(x * -1.44269504f)); }

__device__ inline float swiglu_of(float gate, float up) { return gate * sigmoid(gate) * up; }

/// Rotary embedding: turns a pair of numbers by the angle that has this cosine and this sine.
__device__ inline void rotate_pair(float cos, float sin, float& even, float& odd) {
  const float turned = even * cos - odd * sin;
  odd = odd * cos + even * sin;
  even = turned;
}

}  // namespace tessera::cuda
