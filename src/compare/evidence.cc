#include "compare/evidence.h"

#include <algorithm>

#include "compare/statistics.h"

namespace tessera {

StepWindow window_of(const std::vector<std::int64_t>& steps, double from, double to) {
  const double last = static_cast<double>(steps.back());
  const auto first_above = [&](double part) {
    const auto above = [&](std::int64_t step) { return static_cast<double>(step) > part * last; };
    return static_cast<std::size_t>(std::find_if(steps.begin(), steps.end(), above) - steps.begin());
  };
  return {first_above(from), first_above(to)};
}

StepWindow head_of(const std::vector<std::int64_t>& steps) {
  return {0, std::max<std::size_t>(1, window_of(steps, 0.0, kTail).end)};
}

double mean_in(std::span<const double> losses, StepWindow window) {
  return mean(losses.subspan(window.begin, window.end - window.begin));
}

Evidence evidence_of(const std::vector<std::int64_t>& steps, const std::vector<std::span<const double>>& baselines,
                     const TrainingLength& length, double margin) {
  RunningMean first, last;
  for (const std::span<const double> losses : baselines) {
    first.add(mean_in(losses, head_of(steps)));
    last.add(mean_in(losses, tail_of(steps)));
  }
  return {.tokens = length.tokens,
          .steps_after_warmup = std::max<std::int64_t>(0, steps.back() - length.warmup_steps),
          .needed_steps_after_warmup = std::max(kMinStepsAfterWarmup, length.warmup_steps),
          .fall = first.mean() - last.mean(),
          .needed_fall = kMinFallInMargins * margin * last.mean()};
}

}  // namespace tessera
