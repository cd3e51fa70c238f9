// Decides whether runs trained for long enough that the losses at their end mean anything. docs/compare.md gives the
// reasons for the three minimums.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace tessera {

inline constexpr double kTail = 0.1;  // the last part of the steps, whose losses count
inline constexpr double kMinTokens = 100'000;
inline constexpr std::int64_t kMinStepsAfterWarmup = 100;
/// The number of margins by which the loss must have fallen. The margin is relative to the loss at the end.
inline constexpr double kMinFallInMargins = 20.0;

/// Describes a range of indices [begin, end) of steps.
struct StepWindow {
  std::size_t begin, end;
};

/// Returns the steps in (from, to], which are given as parts of the last step.
StepWindow window_of(const std::vector<std::int64_t>& steps, double from, double to);
/// Returns the last tenth of the steps, whose losses count.
inline StepWindow tail_of(const std::vector<std::int64_t>& steps) { return window_of(steps, 1.0 - kTail, 1.0); }
/// Returns the first tenth of the steps, but at least the first logged step.
StepWindow head_of(const std::vector<std::int64_t>& steps);

/// Returns the mean loss in a window, which is NaN if the window has no step.
double mean_in(std::span<const double> losses, StepWindow window);

/// Says how far a run has learned.
struct Learned {
  double tokens = 0.0;
  std::int64_t steps_after_warmup = 0;
  double first_loss = 0.0, last_loss = 0.0;               // means over the first and the last tenth of the steps
  std::optional<double> uniform_loss = {};                // ln(vocabulary): the loss of a uniform guess
  double fall() const { return first_loss - last_loss; }  // in nats
};

/// Holds the evidence for a verdict, and the least that a verdict needs.
struct Evidence {
  double tokens = 0.0;
  std::int64_t steps_after_warmup = 0, needed_steps_after_warmup = kMinStepsAfterWarmup;
  double fall = 0.0, needed_fall = 0.0;  // of the baseline's loss, in nats

  bool enough_tokens() const { return tokens >= kMinTokens; }
  bool enough_steps() const { return steps_after_warmup >= needed_steps_after_warmup; }
  bool enough_fall() const { return fall >= needed_fall; }
  bool enough() const { return enough_tokens() && enough_steps() && enough_fall(); }
};

/// Says how long each run trained.
struct TrainingLength {
  double tokens = 0.0;
  std::int64_t warmup_steps = 0;
};

/// Returns the evidence. `baselines` has the losses of the baseline's runs at `steps`, which ascend.
Evidence evidence_of(const std::vector<std::int64_t>& steps, const std::vector<std::span<const double>>& baselines,
                     const TrainingLength& length, double margin);

}  // namespace tessera
