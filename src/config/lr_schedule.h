// The learning rate's course: warm-up, stable, decay (as TorchTitan's).
#pragma once

#include <cstdint>

namespace tessera {

enum class DecayType { kLinear, kSqrt, kCosine };

struct LrSchedule {
  std::int64_t warmup_steps = 200;
  std::int64_t total_steps = 0;  // above 0: the schedule is this long, whatever the run's length
  double decay_ratio = -1.0;     // part of the steps that decay; -1: all after the warm-up
  DecayType decay_type = DecayType::kLinear;
  double min_lr_factor = 0.0;

  /// Factor of the learning rate at `step`, from 0, of `num_steps` (or total_steps). With w = warm-up (cut to the run),
  /// d = decay steps and stable = num_steps + 1 - w - d: (s+1)/w while s < w; 1 while s < w + stable; then with p = (s
  /// + 1 - w - stable)/d, 1-p, 1-sqrt(p) or (1+cos(pi p))/2, rescaled to end at min_lr_factor.
  double factor(std::int64_t step, std::int64_t num_steps) const;
};

}  // namespace tessera
