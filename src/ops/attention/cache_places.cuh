// The places of tokens in a cache of latents [slots, positions, row], for kernels.
#pragma once

#include "ops/kit/launch.cuh"

namespace tessera::cuda {

/// Tells where in the cache the row of each token is. Nothing is stored for a token outside the cache, and its
/// attention is NaN, because a GPU cannot throw.
struct CachePlaces {
  const std::int32_t *slots, *positions;
  std::int64_t num_slots, num_positions;

  CachePlaces(const Tensor& slot_T, const Tensor& position_T, const Tensor& cache_SPN)
      : slots(numbers<const std::int32_t>(slot_T)),
        positions(numbers<const std::int32_t>(position_T)),
        num_slots(cache_SPN.dim(0)),
        num_positions(cache_SPN.dim(1)) {}

  __device__ bool contain(std::int64_t token) const {
    return 0 <= slots[token] && slots[token] < num_slots && 0 <= positions[token] && positions[token] < num_positions;
  }
  /// Returns the number of positions up to a token's own, or 0 for a token outside.
  __device__ std::int64_t num_positions_of(std::int64_t token) const {
    return contain(token) ? std::int64_t{positions[token]} + 1 : 0;
  }
  /// Returns the index of the first row of a token's text. A token outside has that of the first text.
  __device__ std::int64_t first_row_of(std::int64_t token) const {
    return contain(token) ? slots[token] * num_positions : 0;
  }
};

}  // namespace tessera::cuda
