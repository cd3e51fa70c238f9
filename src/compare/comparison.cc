#include "compare/comparison.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <optional>
#include <span>

#include "base/error.h"
#include "base/median.h"
#include "compare/statistics.h"

namespace tessera {
namespace {

using ValuesOfSeeds = std::vector<std::vector<double>>;  // per seed, then per step

/// Returns the logged steps that every run has. Runs that broke down are left out, because they end before the others.
std::vector<std::int64_t> common_steps(const std::vector<Side>& sides) {
  std::optional<std::vector<std::int64_t>> common;
  for (const Side& side : sides) {
    for (const RunRecord& run : side.runs) {
      if (run.broken()) continue;
      std::vector<std::int64_t> both;
      if (common) {
        std::ranges::set_intersection(*common, run.steps, std::back_inserter(both));
      } else {
        both = run.steps;
      }
      common = std::move(both);
    }
  }
  return common.value_or(sides[0].runs[0].steps);
}

/// Returns the values that belong to `steps`, with NaN where the run has no such step because it broke down.
std::vector<double> at_steps(const RunRecord& run, const std::vector<double>& values,
                             const std::vector<std::int64_t>& steps) {
  std::vector<double> kept;
  std::size_t i = 0;
  for (const std::int64_t step : steps) {
    while (i < run.steps.size() && run.steps[i] < step) ++i;
    const bool logged = i < run.steps.size() && run.steps[i] == step;
    kept.push_back(logged ? values[i] : std::numeric_limits<double>::quiet_NaN());
  }
  return kept;
}

std::vector<double> smoothed(const std::vector<double>& values) {
  return moving_average(values, smoothing_window(values.size()));
}

/// Returns column i of the rows.
std::vector<double> column(const ValuesOfSeeds& rows, std::size_t i) {
  std::vector<double> values;
  for (const std::vector<double>& row : rows) values.push_back(row[i]);
  return values;
}

/// Returns the mean over the seeds, with the range of the seeds as band.
Curve mean_and_range(const std::vector<std::int64_t>& steps, const ValuesOfSeeds& rows) {
  Curve curve;
  for (std::size_t i = 0; i < steps.size(); ++i) {
    const std::vector<double> values = column(rows, i);
    curve.x.push_back(static_cast<double>(steps[i]));
    curve.y.push_back(mean(values));
    if (rows.size() < 2) continue;
    if (!std::isfinite(curve.y.back())) {
      curve.low.push_back(curve.y.back());
      curve.high.push_back(curve.y.back());
      continue;
    }
    curve.low.push_back(*std::min_element(values.begin(), values.end()));
    curve.high.push_back(*std::max_element(values.begin(), values.end()));
  }
  return thinned(curve);
}

/// Returns the relative difference of smoothed losses: its mean over the seeds, with its confidence interval as band.
Curve difference_curve(const std::vector<std::int64_t>& steps, const std::vector<LossPair>& pairs) {
  ValuesOfSeeds rows;
  for (const LossPair& pair : pairs) {
    const std::vector<double> baseline = smoothed(pair.baseline);
    std::vector<double>& row = rows.emplace_back(smoothed(pair.candidate));
    for (std::size_t i = 0; i < row.size(); ++i) row[i] = row[i] / baseline[i] - 1.0;
  }
  const auto num_seeds = static_cast<std::int64_t>(rows.size());
  const double width_of_one = confidence_half_width(1.0, num_seeds, kConfidence);
  Curve curve;
  for (std::size_t i = 0; i < steps.size(); ++i) {
    const std::vector<double> values = column(rows, i);
    curve.x.push_back(static_cast<double>(steps[i]));
    curve.y.push_back(mean(values));
    if (num_seeds < 2) continue;
    const double half_width = width_of_one * standard_deviation(values);
    curve.low.push_back(curve.y.back() - half_width);
    curve.high.push_back(curve.y.back() + half_width);
  }
  return thinned(curve);
}

std::vector<LossPair> loss_pairs(const Side& baseline, const Side& candidate, const std::vector<std::int64_t>& steps) {
  std::vector<LossPair> pairs;
  for (std::size_t i = 0; i < baseline.runs.size(); ++i) {
    const RunRecord &a = baseline.runs[i], &b = candidate.runs[i];
    pairs.push_back({.seed = a.seed(),
                     .baseline = at_steps(a, a.losses, steps),
                     .candidate = at_steps(b, b.losses, steps),
                     .same_lines = a.steps == b.steps && a.losses == b.losses,
                     .broken = b.broken()});
  }
  return pairs;
}

Learned learned_by(const RunRecord& run, const std::vector<std::int64_t>& steps) {
  const std::vector<double> losses = at_steps(run, run.losses, steps);
  return {.tokens = run.tokens_per_step() * static_cast<double>(run.last_step()),
          .steps_after_warmup = std::max<std::int64_t>(0, run.last_step() - run.warmup_steps()),
          .first_loss = mean_in(losses, head_of(steps)),
          .last_loss = mean_in(losses, tail_of(steps)),
          .uniform_loss = run.uniform_loss()};
}

/// Returns the mean of a side's runs. The runs differ only in their losses, unless one broke down.
Learned mean_of(const std::vector<Learned>& runs) {
  Learned result = runs.front();
  RunningMean tokens, first_loss, last_loss;
  for (const Learned& run : runs) {
    tokens.add(run.tokens);
    first_loss.add(run.first_loss);
    last_loss.add(run.last_loss);
    result.steps_after_warmup = std::min(result.steps_after_warmup, run.steps_after_warmup);
  }
  result.tokens = tokens.mean();
  result.first_loss = first_loss.mean();
  result.last_loss = last_loss.mean();
  return result;
}

Spread spread_of(const std::vector<double>& values) { return {mean(values), standard_deviation(values)}; }

/// Returns whether validation losses have the same meaning on all sides: they are of the same data, and as much of it.
/// Runs that broke down have none at the end.
bool validation_comparable(const std::vector<Side>& sides) {
  const RunRecord& first = sides[0].runs[0];
  for (const Side& side : sides) {
    for (const RunRecord& run : side.runs) {
      if (run.broken()) continue;
      if (!run.validation_losses.contains(run.last_step()) || !run.dataset.contains("val")) return false;
      for (const char* key : {"validation.steps", "training.global_batch_size"}) {
        const auto a = first.config.find(key), b = run.config.find(key);
        if (a == first.config.end() || b == run.config.end() || a->second != b->second) return false;
      }
      if (run.dataset.at("val") != first.dataset.at("val")) return false;
    }
  }
  return true;
}

Curve validation_curve(const Side& side) {
  std::vector<std::int64_t> steps;
  for (const auto& [step, loss] : side.runs[0].validation_losses) {
    const auto has_step = [&, at = step](const RunRecord& run) { return run.validation_losses.contains(at); };
    if (std::all_of(side.runs.begin(), side.runs.end(), has_step)) steps.push_back(step);
  }
  ValuesOfSeeds rows;
  for (const RunRecord& run : side.runs) {
    auto& row = rows.emplace_back();
    for (const std::int64_t step : steps) row.push_back(run.validation_losses.at(step));
  }
  return mean_and_range(steps, rows);
}

/// Means over the seeds, by operand, step and layer.
using SqnrMeans = std::map<std::string, std::map<std::int64_t, std::map<int, RunningMean>>>;

SqnrMeans sqnr_means(const Side& side) {
  SqnrMeans means;
  for (const RunRecord& run : side.runs) {
    for (const SqnrPoint& point : run.sqnr) {
      for (const auto& [operand, layers] : point.by_layer) {
        for (const auto& [layer, value] : layers) means[operand][point.step][layer].add(value);
      }
    }
  }
  return means;
}

double lowest(const WorstSite& site) {
  double value = HUGE_VAL;
  for (const auto& [operand, decibel] : site.sqnr) value = std::min(value, decibel);
  return value;
}

std::vector<WorstSite> worst_sites(const Side& side) {
  std::map<std::string, std::map<std::string, RunningMean>> sums;
  for (const RunRecord& run : side.runs) {
    for (const auto& [site, operands] : run.last_sqnr) {
      for (const auto& [operand, value] : operands) sums[site][operand].add(value);
    }
  }
  std::vector<WorstSite> sites;
  for (const auto& [site, operands] : sums) {
    WorstSite& entry = sites.emplace_back(WorstSite{site, {}});
    for (const auto& [operand, sum] : operands) entry.sqnr[operand] = sum.mean();
  }
  std::stable_sort(sites.begin(), sites.end(),
                   [](const WorstSite& a, const WorstSite& b) { return lowest(a) < lowest(b); });
  if (sites.size() > kMaxWorstSites) sites.resize(kMaxWorstSites);
  return sites;
}

SideResult result_of(const Side& side, const std::vector<std::int64_t>& steps, bool with_validation) {
  SideResult result;
  result.label = side.label;
  ValuesOfSeeds losses, grad_norms;
  std::vector<Learned> learned;
  std::vector<double> final_losses, validation_losses, speeds;
  for (const RunRecord& run : side.runs) {
    losses.push_back(smoothed(at_steps(run, run.losses, steps)));
    grad_norms.push_back(smoothed(at_steps(run, run.grad_norms, steps)));
    learned.push_back(learned_by(run, steps));
    final_losses.push_back(learned.back().last_loss);
    speeds.insert(speeds.end(), run.tokens_per_second.begin(), run.tokens_per_second.end());
    if (with_validation) {
      validation_losses.push_back(run.broken() ? std::numeric_limits<double>::quiet_NaN()
                                               : run.validation_losses.at(run.last_step()));
    }
    result.peak_memory_bytes = std::max(result.peak_memory_bytes, run.peak_memory_bytes);
  }
  result.learned = mean_of(learned);
  result.final_loss = spread_of(final_losses);
  if (with_validation) result.validation_loss = spread_of(validation_losses);
  result.tokens_per_second = median(speeds);
  result.loss = mean_and_range(steps, losses);
  result.grad_norm = mean_and_range(steps, grad_norms);
  result.validation = validation_curve(side);
  add_sqnr_curves(side, result);
  result.worst_sites = worst_sites(side);
  return result;
}

}  // namespace

void add_sqnr_curves(const Side& side, SideResult& result) {
  for (const auto& [operand, steps] : sqnr_means(side)) {
    Curve curve;
    for (const auto& [step, layers] : steps) {
      std::vector<double> values;
      for (const auto& [layer, sum] : layers) values.push_back(sum.mean());
      curve.x.push_back(static_cast<double>(step));
      curve.y.push_back(median(values));
      curve.low.push_back(*std::min_element(values.begin(), values.end()));
      curve.high.push_back(*std::max_element(values.begin(), values.end()));
    }
    for (std::vector<double>* line : {&curve.y, &curve.low, &curve.high}) *line = smoothed(*line);
    result.sqnr[operand] = thinned(curve);
    for (const auto& [layer, sum] : steps.rbegin()->second) {
      if (layer < 0) continue;
      result.sqnr_by_layer[operand].x.push_back(layer);
      result.sqnr_by_layer[operand].y.push_back(sum.mean());
    }
  }
}

Comparison compare_sides(const std::vector<Side>& sides, double margin) {
  require(sides.size() >= 2, "{} side was given; expected two or more: a baseline and what is compared with it",
          sides.size());
  require(sides.size() <= kMaxSides, "{} sides; expected at most {}", sides.size(), kMaxSides);
  require_sound_baseline(sides[0]);
  require_comparable(sides);
  const std::vector<std::int64_t> steps = common_steps(sides);  // has the last one, because these runs are finished
  Comparison comparison;
  comparison.margin = margin;
  comparison.num_steps = steps.back();
  comparison.num_seeds = static_cast<std::int64_t>(sides[0].runs.size());
  comparison.num_lines = static_cast<std::int64_t>(steps.size());
  comparison.smoothing_lines = smoothing_window(steps.size());
  comparison.differences = differences_of(sides);
  const bool with_validation = validation_comparable(sides);
  const RunRecord& baseline = sides[0].runs[0];  // require_comparable: the others trained for as long
  const TrainingLength length = {.tokens = baseline.tokens_per_step() * static_cast<double>(steps.back()),
                                 .warmup_steps = baseline.warmup_steps()};
  for (const Side& side : sides) {
    SideResult& result = comparison.sides.emplace_back(result_of(side, steps, with_validation));
    for (const RunRecord& run : side.runs) {
      comparison.runs.push_back({side.label, run.seed(), run.folder.string(), run.program, run.processor, run.threads,
                                 learned_by(run, steps), median(run.tokens_per_second)});
    }
    if (&side == &sides[0]) continue;
    const auto same = [&, i = comparison.sides.size() - 1](const Difference& difference) {
      return is_of_machine(difference.key) || difference.values[i] == difference.values[0];
    };
    result.same_configuration = std::all_of(comparison.differences.begin(), comparison.differences.end(), same);
    const std::vector<LossPair> pairs = loss_pairs(sides[0], side, steps);
    result.verdict = judge(steps, pairs, margin, length);
    result.difference = difference_curve(steps, pairs);
  }
  return comparison;
}

}  // namespace tessera
