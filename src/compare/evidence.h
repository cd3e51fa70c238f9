// Whether runs have trained for long enough that the losses at their end say anything. docs/compare.md has the reasons
// for the three minimums.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace tessera {

inline constexpr double kTail = 0.1;  // part of the steps whose losses count
inline constexpr double kMinTokens = 100'000;
inline constexpr std::int64_t kMinStepsAfterWarmup = 100;
/// How many times the margin the loss must have fallen, relative to the loss at the end.
inline constexpr double kMinFallInMargins = 20.0;

/// Indices [begin, end) of steps.
struct StepWindow {
  std::size_t begin, end;
};

/// The steps in (from, to], which are parts of the last step.
StepWindow window_of(const std::vector<std::int64_t>& steps, double from, double to);
/// The last tenth of the steps: those whose losses count.
inline StepWindow tail_of(const std::vector<std::int64_t>& steps) { return window_of(steps, 1.0 - kTail, 1.0); }
/// The first tenth of the steps; the first logged step at least.
StepWindow head_of(const std::vector<std::int64_t>& steps);

/// The mean loss in a window.
double mean_in(std::span<const double> losses, StepWindow window);

/// How far a run has learned.
struct Learned {
  double tokens = 0.0;
  std::int64_t steps_after_warmup = 0;
  double first_loss = 0.0, last_loss = 0.0;               // means over the first and the last tenth of the steps
  std::optional<double> uniform_loss = {};                // ln(vocabulary): of a guess that knows nothing
  double fall() const { return first_loss - last_loss; }  // in nats
};

/// What a verdict rests on, and the least that it needs.
struct Evidence {
  double tokens = 0.0;
  std::int64_t steps_after_warmup = 0, needed_steps_after_warmup = kMinStepsAfterWarmup;
  double fall = 0.0, needed_fall = 0.0;  // of the baseline's loss, in nats

  bool enough_tokens() const { return tokens >= kMinTokens; }
  bool enough_steps() const { return steps_after_warmup >= needed_steps_after_warmup; }
  bool enough_fall() const { return fall >= needed_fall; }
  bool enough() const { return enough_tokens() && enough_steps() && enough_fall(); }
};

/// How long each of the runs trained.
struct TrainingLength {
  double tokens = 0.0;
  std::int64_t warmup_steps = 0;
};

/// `baselines`: the losses of the baseline's runs at `steps`, which ascend.
Evidence evidence_of(const std::vector<std::int64_t>& steps, const std::vector<std::span<const double>>& baselines,
                     const TrainingLength& length, double margin);

}  // namespace tessera
