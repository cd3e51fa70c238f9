#include "config/lr_schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace tessera {

double LrSchedule::factor(std::int64_t step, std::int64_t num_steps) const {
  if (total_steps > 0) num_steps = total_steps;
  step = std::min(step, num_steps - 1);  // a longer run stays at the end of the schedule
  const std::int64_t warmup = std::min(warmup_steps, num_steps);
  std::int64_t decay = num_steps - warmup;
  if (decay_ratio >= 0.0) {
    const auto asked = static_cast<std::int64_t>(std::nearbyint(static_cast<double>(num_steps) * decay_ratio));
    decay = std::min(decay, asked);
  }
  const std::int64_t stable = num_steps + 1 - warmup - decay;
  if (step < warmup) return static_cast<double>(step + 1) / static_cast<double>(warmup);
  if (step < warmup + stable) return 1.0;
  const double p = static_cast<double>(step + 1 - warmup - stable) / static_cast<double>(decay);
  double course = 0.0;
  switch (decay_type) {
    case DecayType::kLinear:
      course = 1.0 - p;
      break;
    case DecayType::kSqrt:
      course = 1.0 - std::sqrt(p);
      break;
    case DecayType::kCosine:
      course = 0.5 * (1.0 + std::cos(std::numbers::pi * p));
      break;
  }
  return min_lr_factor + (1.0 - min_lr_factor) * course;
}

}  // namespace tessera
