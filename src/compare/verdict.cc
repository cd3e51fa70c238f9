#include "compare/verdict.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "base/error.h"
#include "compare/statistics.h"

namespace tessera {
namespace {

/// Indices [begin, end) of the steps in (from, to], as parts of the last step.
struct Window {
  std::size_t begin, end;
};

Window window_of(const std::vector<std::int64_t>& steps, double from, double to) {
  const double last = static_cast<double>(steps.back());
  const auto first_above = [&](double part) {
    const auto above = [&](std::int64_t step) { return static_cast<double>(step) > part * last; };
    return static_cast<std::size_t>(std::find_if(steps.begin(), steps.end(), above) - steps.begin());
  };
  return {first_above(from), first_above(to)};
}

/// The candidate's mean loss in the window, less the baseline's, over the baseline's.
double relative_difference(const LossPair& pair, Window window) {
  const std::size_t size = window.end - window.begin;
  const double baseline = mean(std::span(pair.baseline).subspan(window.begin, size));
  return mean(std::span(pair.candidate).subspan(window.begin, size)) / baseline - 1.0;
}

/// The first loss that is not finite: its index.
std::optional<std::size_t> first_non_finite(const std::vector<double>& losses) {
  const auto found = std::find_if(losses.begin(), losses.end(), [](double loss) { return !std::isfinite(loss); });
  if (found == losses.end()) return {};
  return static_cast<std::size_t>(found - losses.begin());
}

/// Whether a difference above 0 grows so, since the middle of the run, that it would pass the margin within as many
/// steps again. The growth must be certain to 99 %, so that noise is not taken for it.
bool grows_out_of(double margin, const std::vector<std::int64_t>& steps, const std::vector<LossPair>& pairs,
                  const Verdict& verdict) {
  constexpr double kMiddle = 0.5, kGrowthConfidence = 0.98;  // two-sided, so 1 % on the side that counts
  constexpr double kPartBetween = 1.0 - kTail - kMiddle;     // from the middle of one window to that of the other
  const Window middle = window_of(steps, kMiddle, kMiddle + kTail);
  if (middle.begin == middle.end || verdict.difference - verdict.half_width <= 0.0) return false;
  std::vector<double> growth;
  for (std::size_t i = 0; i < pairs.size(); ++i) {
    growth.push_back((verdict.differences[i] - relative_difference(pairs[i], middle)) / kPartBetween);
  }
  const double slope = mean(growth);
  const double uncertainty = confidence_half_width(standard_deviation(growth), verdict.num_seeds, kGrowthConfidence);
  return slope - uncertainty > 0.0 && verdict.difference + slope > margin;
}

std::string percent(double fraction, int decimals, bool sign) {
  const char* mark = !sign ? "" : fraction < 0.0 ? "−" : "+";
  return fmt::format("{}{:.{}f} %", mark, 100.0 * (sign ? std::abs(fraction) : fraction), decimals);
}

/// As many decimals as the uncertainty has a use for: 2 to 4.
int decimals_for(double half_width) {
  if (!(half_width > 0.0) || !std::isfinite(half_width)) return 2;
  return std::clamp(static_cast<int>(std::ceil(-std::log10(100.0 * half_width))), 2, 4);
}

std::string describe(const Verdict& verdict) {
  const int decimals = decimals_for(verdict.half_width);
  const std::string margin = fmt::format("margin {:g} %", 100.0 * verdict.margin);
  const std::string uncertainty =
      std::isfinite(verdict.half_width) ? " ± " + percent(verdict.half_width, decimals, false) : "";
  const std::string size = percent(std::abs(verdict.difference), decimals, false) + uncertainty;
  const std::string difference =
      fmt::format("(difference {}{}, {})", percent(verdict.difference, decimals, true), uncertainty, margin);
  switch (verdict.kind) {
    case Verdict::Kind::kEquivalent:
      return verdict.identical ? "equivalent: the same losses at every step" : "equivalent " + difference;
    case Verdict::Kind::kBetter:
      return fmt::format("better by {} ({})", size, margin);
    case Verdict::Kind::kWorse:
      if (!verdict.growing) return fmt::format("worse by {} ({})", size, margin);
      return fmt::format("worse by {} and growing: it would pass the margin of {:g} % if the run were twice as long",
                         size, 100.0 * verdict.margin);
    case Verdict::Kind::kNotEnoughEvidence:
      break;
  }
  const std::string more = verdict.more_seeds > kMaxMoreSeeds ? fmt::format("more than {} more seeds", kMaxMoreSeeds)
                           : verdict.more_seeds == 1          ? "1 more seed"
                                                              : fmt::format("{} more seeds", verdict.more_seeds);
  return fmt::format("not enough evidence: {} {}", more, difference);
}

void require_finite_baseline(const std::vector<std::int64_t>& steps, const LossPair& pair) {
  const auto bad = first_non_finite(pair.baseline);
  require(!bad, "the baseline's loss is not finite at step {} of seed {}: there is nothing to compare with",
          bad ? steps[*bad] : 0, pair.seed);
  require(mean(pair.baseline) > 0.0, "the baseline's mean loss with seed {} is {}; expected a number above 0",
          pair.seed, mean(pair.baseline));
}

}  // namespace

const char* name_of(Verdict::Kind kind) {
  switch (kind) {
    case Verdict::Kind::kEquivalent:
      return "equivalent";
    case Verdict::Kind::kWorse:
      return "worse";
    case Verdict::Kind::kBetter:
      return "better";
    case Verdict::Kind::kNotEnoughEvidence:
      break;
  }
  return "not enough evidence";
}

Verdict::Kind decide(double mean, double standard_deviation, std::int64_t count, double margin) {
  if (count < kMinSeeds) return Verdict::Kind::kNotEnoughEvidence;
  const double half_width = confidence_half_width(standard_deviation, count, kConfidence);
  if (std::abs(mean) + half_width < margin) return Verdict::Kind::kEquivalent;
  // A difference that is certain, but perhaps within the margin, is not called worse: more seeds can still show that it
  // is too small to matter.
  if (mean >= margin && mean - half_width > 0.0) return Verdict::Kind::kWorse;
  if (mean <= -margin && mean + half_width < 0.0) return Verdict::Kind::kBetter;
  return Verdict::Kind::kNotEnoughEvidence;
}

std::int64_t seeds_to_add(double mean, double standard_deviation, std::int64_t count, double margin) {
  std::int64_t more = std::max<std::int64_t>(1, kMinSeeds - count);
  if (count < 2) return more;
  while (more <= kMaxMoreSeeds &&
         decide(mean, standard_deviation, count + more, margin) == Verdict::Kind::kNotEnoughEvidence) {
    ++more;
  }
  return more;
}

Verdict judge(const std::vector<std::int64_t>& steps, const std::vector<LossPair>& pairs, double margin) {
  TESSERA_CHECK(!steps.empty() && !pairs.empty(), "{} steps, {} pairs", steps.size(), pairs.size());
  require(std::isfinite(margin) && margin > 0.0, "the margin is {} %; expected a number above 0", 100.0 * margin);
  Verdict verdict;
  verdict.num_seeds = static_cast<std::int64_t>(pairs.size());
  verdict.margin = margin;
  verdict.identical = true;
  const LossPair* broken = nullptr;
  for (const LossPair& pair : pairs) {
    require_finite_baseline(steps, pair);
    verdict.differences.push_back(relative_difference(pair, window_of(steps, 1.0 - kTail, 1.0)));
    verdict.identical = verdict.identical && pair.baseline == pair.candidate;
    if (broken == nullptr && first_non_finite(pair.candidate)) broken = &pair;
  }
  verdict.difference = mean(verdict.differences);
  const double deviation = standard_deviation(verdict.differences);
  verdict.half_width = confidence_half_width(deviation, verdict.num_seeds, kConfidence);
  if (broken != nullptr) {
    verdict.broken = true;
    verdict.kind = Verdict::Kind::kWorse;
    verdict.text = fmt::format("worse: the loss is not finite at step {} (seed {})",
                               steps[*first_non_finite(broken->candidate)], broken->seed);
    return verdict;
  }
  verdict.kind =
      verdict.identical ? Verdict::Kind::kEquivalent : decide(verdict.difference, deviation, verdict.num_seeds, margin);
  if (verdict.kind == Verdict::Kind::kEquivalent && !verdict.identical) {
    verdict.growing = grows_out_of(margin, steps, pairs, verdict);
    if (verdict.growing) verdict.kind = Verdict::Kind::kWorse;
  }
  if (verdict.kind == Verdict::Kind::kNotEnoughEvidence) {
    verdict.more_seeds = seeds_to_add(verdict.difference, deviation, verdict.num_seeds, margin);
  }
  verdict.text = describe(verdict);
  return verdict;
}

}  // namespace tessera
