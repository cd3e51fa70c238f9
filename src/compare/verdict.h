// Decides whether one side's runs reach the other side's loss: an equivalence test on losses that are paired by seed.
//
// Per seed, d = (mean loss of the candidate - that of the baseline) / that of the baseline, over the last tenth of the
// steps. The 90 % confidence interval of d's mean over the seeds (Student's t) decides. If it is inside of +-margin,
// the two are equivalent. This is two one-sided t-tests at 5 % (Schuirmann 1987, "TOST"). If it is above the margin,
// the candidate is worse. Mirrored, it is better. Everything else is not enough evidence. Runs that have hardly learned
// anything are too short to say (compare/evidence.h).
//
// The default margin is the bound that DeepSeek-V3's report gives for FP8 against BF16: a relative loss error below
// 0.25 % (arXiv 2412.19437, section 3.3).
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "compare/evidence.h"
#include "compare/run_record.h"

namespace tessera {

inline constexpr double kDefaultMargin = 0.0025;
inline constexpr double kConfidence = 0.90;
inline constexpr std::int64_t kMinSeeds = 3;
inline constexpr std::int64_t kMaxMoreSeeds = 100;

/// Holds the losses of two runs with the same seed, at the same steps.
struct LossPair {
  std::int64_t seed = 0;
  std::vector<double> baseline, candidate;
  bool same_lines = true;            // both runs logged the same steps with the same losses
  std::optional<Break> broken = {};  // in the candidate's run, at any step that it logged
};

struct Verdict {
  enum class Kind { kEquivalent, kWorse, kBetter, kNotEnoughEvidence, kTooShort };
  Kind kind = Kind::kNotEnoughEvidence;
  std::string text;   // one line
  Evidence evidence;  // how far the baseline has learned
  std::int64_t num_seeds = 0;
  std::vector<double> differences;  // d of every seed, as a fraction
  double difference = 0.0;          // their mean
  double half_width = 0.0;          // half the width of its confidence interval; infinite with one seed
  double margin = 0.0;
  std::int64_t more_seeds = 0;  // more seeds that are needed; above kMaxMoreSeeds: more than that; 0: decided
  bool near_margin = false;     // kMaxMoreSeeds would be enough if the difference were 0
  bool identical = false;       // the same logged steps with the same losses, bit for bit
  bool broken = false;          // a loss or gradient norm of the candidate is not finite
  bool growing = false;         // within the margin, but growing beyond it
  /// The growth of the gap between the losses since the middle of the run. It is divided by the baseline's loss at its
  /// end, and scaled to as many steps as the run has. NaN if it is not known.
  double growth_rate = std::numeric_limits<double>::quiet_NaN();
};

/// Returns "equivalent", "worse", "better", "not enough evidence" or "too short to say".
const char* name_of(Verdict::Kind kind);

/// Throws Error unless the margin is a number above 0.
void require_margin(double margin);

/// Returns what a sample of `count` differences shows. It never decides with fewer than kMinSeeds.
Verdict::Kind decide(double mean, double standard_deviation, std::int64_t count, double margin);

/// Returns the smallest number of seeds to add at which decide() decides, if mean and standard deviation stay. It is at
/// least the number that makes kMinSeeds, and kMaxMoreSeeds + 1 if that many are not enough. `count` is 1 or more. With
/// 1 the deviation is ignored.
std::int64_t seeds_to_add(double mean, double standard_deviation, std::int64_t count, double margin);

/// Judges the candidate. `steps` ascend and belong to every pair's losses. Throws Error for a baseline whose
/// losses are not finite, or not above 0 at the end, because there is nothing to compare with. A candidate whose loss
/// is not finite at some step is worse, however short the runs are.
Verdict judge(const std::vector<std::int64_t>& steps, const std::vector<LossPair>& pairs, double margin,
              const TrainingLength& length);

}  // namespace tessera
