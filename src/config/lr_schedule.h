// The schedule of the learning rate: warm-up, stable, decay, as TorchTitan's.
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

  /// Returns the factor of the learning rate at step s, which counts from 0, of `num_steps` (or total_steps). Let w be
  /// the warm-up (cut to the run), d the decay steps and stable = num_steps + 1 - w - d. The factor is
  ///   (s + 1) / w   while s < w,
  ///   1   while s < w + stable,
  ///   then 1 - p, 1 - sqrt(p) or (1 + cos(pi p)) / 2 with p = (s + 1 - w - stable) / d.
  /// The decay is rescaled to end at min_lr_factor.
  double factor(std::int64_t step, std::int64_t num_steps) const;
};

}  // namespace tessera
