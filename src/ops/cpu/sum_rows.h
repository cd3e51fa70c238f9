// Sums the rows that belong to one token.
#pragma once

#include "ops/cpu/types.h"

namespace tessera::cpu {

/// Computes sum += weight · x. It is not inlined, because GCC would then unroll the loop over rows and not use vector
/// instructions in this one.
template <typename T>
[[gnu::noinline]] void add_row(const T* x, float weight, std::int64_t count, float* sum) {
  for (std::int64_t j = 0; j < count; ++j) sum[j] += weight * load(x[j]);
}

/// Assigns or adds to y the sum over i in [0, num_rows) of weights[i] · row(i). It sums in this order in float32, and
/// rounds once. Rows and y have `length` numbers. If `weights` is null, all weights are 1.
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
