// Computes one number of ops/elementwise/init.h. The CPU's and the GPU's implementations both use it.
#pragma once

#include "ops/elementwise/init.h"

namespace tessera {

TESSERA_HOST_DEVICE inline float initial_number(const Philox& random, const InitPattern& pattern, std::int64_t index) {
  const Init& init = index / pattern.run % 2 == 0 ? pattern.first : pattern.second;
  if (init.std == 0.0f) return 1.0f;
  const auto at = static_cast<std::uint64_t>(index);
  const double value =
      init.bound > 0.0f ? random.truncated_normal(at, static_cast<double>(init.bound / init.std)) : random.normal(at);
  return static_cast<float>(value * static_cast<double>(init.std));
}

}  // namespace tessera
