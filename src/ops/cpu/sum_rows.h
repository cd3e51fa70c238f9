// The sum that brings a token's rows together again.
#pragma once

#include "ops/cpu/types.h"

namespace tessera::cpu {

/// sum += weight · x. Not inlined: GCC would unroll the loop over rows, and use no vector instructions in this one.
template <typename T>
[[gnu::noinline]] void add_row(const T* x, float weight, std::int64_t count, float* sum) {
  for (std::int64_t j = 0; j < count; ++j) sum[j] += weight * load(x[j]);
}

/// y (= or +=) sum over i in [0, num_rows) of weights[i] · row(i), in this order, in float32 and rounded once; rows and
/// y of `length` numbers. Without weights: all 1.
template <typename T, typename Row>
void sum_rows(std::int64_t num_rows, Row&& row, const float* weights, std::int64_t length, Write write, T* y) {
  constexpr std::int64_t kBlock = 256;
  float sum[kBlock];
  for (std::int64_t first = 0; first < length; first += kBlock) {
    const std::int64_t count = std::min(kBlock, length - first);
    for (std::int64_t j = 0; j < count; ++j) sum[j] = write == Write::kAccumulate ? load(y[first + j]) : 0.0f;
    for (std::int64_t i = 0; i < num_rows; ++i) {
      add_row(row(i) + first, weights != nullptr ? weights[i] : 1.0f, count, sum);
    }
    for (std::int64_t j = 0; j < count; ++j) store(y[first + j], sum[j]);
  }
}

}  // namespace tessera::cpu
