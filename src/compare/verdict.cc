#include "compare/verdict.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <span>

#include "base/error.h"
#include "compare/statistics.h"

namespace tessera {
namespace {

/// Returns the candidate's mean loss in the window minus the baseline's, divided by the baseline's.
double relative_difference(const LossPair& pair, StepWindow window) {
  return mean_in(pair.candidate, window) / mean_in(pair.baseline, window) - 1.0;
}

/// Returns the index of the first loss that is not finite.
std::optional<std::size_t> first_non_finite(const std::vector<double>& losses) {
  const auto found = std::find_if(losses.begin(), losses.end(), [](double loss) { return !std::isfinite(loss); });
  if (found == losses.end()) return {};
  return static_cast<std::size_t>(found - losses.begin());
}

/// Sets the growth rate, and whether a difference above 0 grows too fast. It does if, at the rate since the middle of
/// the run, it would pass the margin within as many steps again. The growth must be certain to 99 %, so that noise does
/// not count. The absolute gap is extrapolated, because the relative one grows by itself if the baseline's loss falls.
void find_growth(const std::vector<std::int64_t>& steps, const std::vector<LossPair>& pairs, Verdict& verdict) {
  constexpr double kMiddle = 0.5, kGrowthConfidence = 0.98;  // two-sided, so 1 % on the side that matters
  constexpr double kPartBetween = 1.0 - kTail - kMiddle;     // from the middle of one window to the middle of the other
  const StepWindow middle = window_of(steps, kMiddle, kMiddle + kTail), tail = tail_of(steps);
  if (middle.begin == middle.end) return;
  std::vector<double> growth;
  for (const LossPair& pair : pairs) {
    const double end_loss = mean_in(pair.baseline, tail);
    const double gap = mean_in(pair.candidate, tail) - end_loss;
    const double middle_gap = mean_in(pair.candidate, middle) - mean_in(pair.baseline, middle);
    growth.push_back((gap - middle_gap) / end_loss / kPartBetween);
  }
  verdict.growth_rate = mean(growth);
  const double uncertainty = confidence_half_width(standard_deviation(growth), verdict.num_seeds, kGrowthConfidence);
  verdict.growing = verdict.kind == Verdict::Kind::kEquivalent && verdict.difference - verdict.half_width > 0.0 &&
                    verdict.growth_rate - uncertainty > 0.0 &&
                    verdict.difference + verdict.growth_rate > verdict.margin;
}

std::string percent(double fraction, int decimals, bool sign) {
  const char* mark = !sign ? "" : fraction < 0.0 ? "−" : "+";
  return fmt::format("{}{:.{}f} %", mark, 100.0 * (sign ? std::abs(fraction) : fraction), decimals);
}

/// Returns as many decimals as the uncertainty justifies: 2 to 4.
int decimals_for(double half_width) {
  if (!(half_width > 0.0) || !std::isfinite(half_width)) return 2;
  return std::clamp(static_cast<int>(std::ceil(-std::log10(100.0 * half_width))), 2, 4);
}

/// Describes what the runs lack: how much of it they have, and how much would be enough.
std::string describe_shortage(const Verdict& verdict) {
  const Evidence& evidence = verdict.evidence;
  std::vector<std::string> parts;
  if (!evidence.enough_tokens()) {
    parts.push_back(fmt::format("{:.0f} tokens (enough: {:.0f})", evidence.tokens, kMinTokens));
  }
  if (!evidence.enough_steps()) {
    parts.push_back(fmt::format("{} steps after the warm-up (enough: {})", evidence.steps_after_warmup,
                                evidence.needed_steps_after_warmup));
  }
  if (!evidence.enough_fall()) {
    parts.push_back(fmt::format("the baseline's loss has {} by {:.3f} nats (enough: a fall of {:.3f})",
                                evidence.fall < 0.0 ? "risen" : "fallen", std::abs(evidence.fall),
                                evidence.needed_fall));
  }
  return fmt::format("too short to say: {}{}", fmt::join(parts, ", "),
                     verdict.identical ? "; so far the losses are the same" : "");
}

std::string describe(const Verdict& verdict, bool every_step) {
  const int decimals = decimals_for(verdict.half_width);
  const std::string margin = fmt::format("margin {:g} %", 100.0 * verdict.margin);
  const std::string uncertainty =
      std::isfinite(verdict.half_width) ? " ± " + percent(verdict.half_width, decimals, false) : "";
  const std::string size = percent(std::abs(verdict.difference), decimals, false) + uncertainty;
  const std::string difference =
      fmt::format("(difference {}{}, {})", percent(verdict.difference, decimals, true), uncertainty, margin);
  switch (verdict.kind) {
    case Verdict::Kind::kEquivalent:
      if (!verdict.identical) return "equivalent " + difference;
      return fmt::format("equivalent: the same losses at every {}step", every_step ? "" : "logged ");
    case Verdict::Kind::kBetter:
      return fmt::format("better by {} ({})", size, margin);
    case Verdict::Kind::kWorse:
      if (!verdict.growing) return fmt::format("worse by {} ({})", size, margin);
      return fmt::format(
          "worse by {} and growing: at this rate it passes the margin of {:g} % before the run is twice as long", size,
          100.0 * verdict.margin);
    case Verdict::Kind::kNotEnoughEvidence:
    case Verdict::Kind::kTooShort:  // describe_shortage writes its text
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
  const double at_end = mean_in(pair.baseline, tail_of(steps));
  require(at_end > 0.0, "the baseline's mean loss at the end with seed {} is {}; expected a number above 0", pair.seed,
          at_end);
}

}  // namespace

void require_margin(double margin) {
  require(std::isfinite(margin) && margin > 0.0, "the margin is {} %; expected a number above 0", 100.0 * margin);
}

const char* name_of(Verdict::Kind kind) {
  switch (kind) {
    case Verdict::Kind::kEquivalent:
      return "equivalent";
    case Verdict::Kind::kWorse:
      return "worse";
    case Verdict::Kind::kBetter:
      return "better";
    case Verdict::Kind::kTooShort:
      return "too short to say";
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
  if (mean - half_width > margin) return Verdict::Kind::kWorse;
  if (mean + half_width < -margin) return Verdict::Kind::kBetter;
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

Verdict judge(const std::vector<std::int64_t>& steps, const std::vector<LossPair>& pairs, double margin,
              const TrainingLength& length) {
  TESSERA_CHECK(!steps.empty() && !pairs.empty(), "{} steps, {} pairs", steps.size(), pairs.size());
  require_margin(margin);
  Verdict verdict;
  verdict.num_seeds = static_cast<std::int64_t>(pairs.size());
  verdict.margin = margin;
  verdict.identical = true;
  const LossPair* broken_pair = nullptr;
  std::vector<std::span<const double>> baselines;
  Break broken;
  for (const LossPair& pair : pairs) {
    require_finite_baseline(steps, pair);
    baselines.emplace_back(pair.baseline);
    verdict.differences.push_back(relative_difference(pair, tail_of(steps)));
    verdict.identical = verdict.identical && pair.same_lines && pair.baseline == pair.candidate;
    const auto bad = first_non_finite(pair.candidate);
    if (broken_pair != nullptr || (!pair.broken && !bad)) continue;
    broken_pair = &pair;
    broken = pair.broken ? *pair.broken : Break{steps[*bad], "loss"};
  }
  verdict.evidence = evidence_of(steps, baselines, length, margin);
  verdict.difference = mean(verdict.differences);
  const double deviation = standard_deviation(verdict.differences);
  verdict.half_width = confidence_half_width(deviation, verdict.num_seeds, kConfidence);
  if (broken_pair != nullptr) {
    verdict.broken = true;
    verdict.kind = Verdict::Kind::kWorse;
    verdict.text =
        fmt::format("worse: the {} is not finite at step {} (seed {})", broken.what, broken.step, broken_pair->seed);
    return verdict;
  }
  if (!verdict.evidence.enough()) {
    verdict.kind = Verdict::Kind::kTooShort;
    verdict.text = describe_shortage(verdict);
    return verdict;
  }
  verdict.kind =
      verdict.identical ? Verdict::Kind::kEquivalent : decide(verdict.difference, deviation, verdict.num_seeds, margin);
  find_growth(steps, pairs, verdict);
  if (verdict.growing) verdict.kind = Verdict::Kind::kWorse;
  if (verdict.kind == Verdict::Kind::kNotEnoughEvidence) {
    verdict.more_seeds = seeds_to_add(verdict.difference, deviation, verdict.num_seeds, margin);
    verdict.near_margin =
        verdict.more_seeds > kMaxMoreSeeds && seeds_to_add(0.0, deviation, verdict.num_seeds, margin) <= kMaxMoreSeeds;
  }
  verdict.text = describe(verdict, static_cast<std::int64_t>(steps.size()) == steps.back());
  return verdict;
}

}  // namespace tessera
