// Whether one side's runs reach the other's loss: an equivalence test on losses that are paired by seed.
//
// Per seed, d = (mean loss of the candidate - that of the baseline) / that of the baseline, over the last tenth of the
// steps. The 90 % confidence interval of d's mean over the seeds (Student's t) decides: inside of +-margin the two are
// equivalent, which is two one-sided t-tests at 5 % (Schuirmann 1987, "TOST"). With an interval above 0 around a mean
// of the margin or more, the candidate is worse; mirrored, it is better. Everything else is not enough evidence.
//
// The default margin is the bound that DeepSeek-V3's report gives for FP8 against BF16: a relative loss error below
// 0.25 % (arXiv 2412.19437, section 3.3).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera {

inline constexpr double kDefaultMargin = 0.0025;
inline constexpr double kConfidence = 0.90;
inline constexpr double kTail = 0.1;  // part of the steps whose losses count
inline constexpr std::int64_t kMinSeeds = 3;
inline constexpr std::int64_t kMaxMoreSeeds = 100;

/// Losses of two runs with the same seed, at the same steps.
struct LossPair {
  std::int64_t seed = 0;
  std::vector<double> baseline, candidate;
};

struct Verdict {
  enum class Kind { kEquivalent, kWorse, kBetter, kNotEnoughEvidence };
  Kind kind = Kind::kNotEnoughEvidence;
  std::string text;  // one line
  std::int64_t num_seeds = 0;
  std::vector<double> differences;  // d of every seed, a fraction
  double difference = 0.0;          // their mean
  double half_width = 0.0;          // of its confidence interval; infinite with one seed
  double margin = 0.0;
  std::int64_t more_seeds = 0;  // above kMaxMoreSeeds: more than that; 0: decided
  bool identical = false;       // the same losses at every step, bit for bit
  bool broken = false;          // a loss of the candidate is not finite
  bool growing = false;         // within the margin, but on the way out of it
};

/// "equivalent", "worse", "better", "not enough evidence".
const char* name_of(Verdict::Kind kind);

/// What a sample of `count` differences says. Never decides with fewer than kMinSeeds.
Verdict::Kind decide(double mean, double standard_deviation, std::int64_t count, double margin);

/// The smallest number of seeds to add at which decide() decides, if mean and standard deviation stay; at least as many
/// as make kMinSeeds; kMaxMoreSeeds + 1 if that many do not do. `count` is 1 or more; with 1 the deviation is ignored.
std::int64_t seeds_to_add(double mean, double standard_deviation, std::int64_t count, double margin);

/// `steps` ascend and belong to every pair's losses. Throws Error for a baseline without finite, positive losses: there
/// is nothing to compare with. A candidate whose loss is not finite anywhere is worse.
Verdict judge(const std::vector<std::int64_t>& steps, const std::vector<LossPair>& pairs, double margin);

}  // namespace tessera
