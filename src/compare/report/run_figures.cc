#include "compare/report/run_figures.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "base/median.h"
#include "compare/comparison.h"
#include "compare/report/html.h"
#include "compare/report/report_figures.h"
#include "compare/report/svg_plot.h"
#include "compare/statistics.h"

namespace tessera {
namespace {

bool any_finite(const std::vector<double>& values) {
  return std::any_of(values.begin(), values.end(), [](double value) { return std::isfinite(value); });
}

double highest(const std::vector<double>& values) {
  double result = 0.0;
  for (const double value : values) {
    if (std::isfinite(value)) result = std::max(result, value);
  }
  return result;
}

/// Returns the range of steps, which all figures over the steps share, so that they can be read one below the other.
std::pair<double, double> steps_of(const RunRecord& run) {
  return {static_cast<double>(run.steps.front() - 1), static_cast<double>(run.last_step())};
}

/// Returns the steps at which a resumed run got another configuration.
std::vector<double> marks_of(const RunRecord& run) {
  std::vector<double> marks;
  for (const ConfigChange& change : run.changes()) {
    if (marks.empty() || marks.back() != static_cast<double>(change.step)) {
      marks.push_back(static_cast<double>(change.step));
    }
  }
  return marks;
}

const LegendEntry kChangeEntry = {"configuration changed", "mark-x"};

/// Draws a figure with the range and the marks that all figures over the steps share.
std::string step_figure(const RunRecord& run, const std::string& title, Plot plot,
                        const std::vector<LegendEntry>& legend, const std::string& caption) {
  plot.x_label = "step";
  plot.x_range = steps_of(run);
  plot.x_marks = marks_of(run);
  plot.description = title + " over the steps";
  return html_figure(title, legend, svg_plot(plot), caption);
}

std::string run_smoothing_text(const RunRecord& run) {
  const std::int64_t window = smoothing_window(run.steps.size());
  if (window <= 1) return "One point per logged step, not smoothed.";
  return fmt::format("Line: moving average over {} logged steps. Band: lowest to highest of them.", window);
}

/// Returns a range from 0 to a little above the highest value, for quantities that have a meaningful 0.
std::pair<double, double> from_zero(const std::vector<double>& values) {
  constexpr double kRoom = 1.08;
  const double high = highest(values);
  return {0.0, high > 0.0 ? kRoom * high : 1.0};
}

std::string loss_figure(const RunRecord& run) {
  Plot plot{.id = "loss", .y_label = "cross-entropy, nats"};
  std::vector<LegendEntry> legend;
  const auto add = [&](PlotSeries series, const std::string& label) {
    legend.push_back({label, line_class(series)});
    plot.series.push_back(std::move(series));
  };
  add({.curve = smoothed_curve(run.steps, run.losses), .style = 0}, "training");
  if (any_finite(run.mtp_losses)) {
    Curve curve = smoothed_curve(run.steps, run.mtp_losses);
    curve.low.clear();  // one band is enough
    curve.high.clear();
    add({.curve = std::move(curve), .style = 2}, "multi-token prediction");
  }
  if (!run.validation_losses.empty()) {
    Curve curve;
    for (const auto& [step, loss] : run.validation_losses) {
      curve.x.push_back(static_cast<double>(step));
      curve.y.push_back(loss);
    }
    add({.curve = std::move(curve), .style = 1, .points = true}, "validation");
  }
  if (!run.changed.empty()) legend.push_back(kChangeEntry);  // one legend says it for all figures
  return step_figure(run, "Loss", std::move(plot), legend, run_smoothing_text(run));
}

/// Draws the loss of the second half with its own scale. With the scale of the first steps its changes would not be
/// visible.
std::string late_loss_figure(const RunRecord& run) {
  constexpr std::size_t kFewLines = 40;
  const std::size_t half = run.steps.size() / 2;
  if (run.steps.size() < kFewLines) return "";
  const Curve whole = smoothed_curve(run.steps, run.losses);
  const double from = static_cast<double>(run.steps[half]);
  Plot plot{.id = "lateloss",
            .description = "Loss over the second half of the steps",
            .x_label = "step",
            .y_label = "cross-entropy, nats"};
  PlotSeries training{.curve = {}, .style = 0}, validation{.curve = {}, .style = 1, .points = true};
  for (std::size_t i = 0; i < whole.x.size(); ++i) {
    if (whole.x[i] < from) continue;
    training.curve.x.push_back(whole.x[i]);
    training.curve.y.push_back(whole.y[i]);
  }
  for (const auto& [step, loss] : run.validation_losses) {
    if (static_cast<double>(step) < from) continue;
    validation.curve.x.push_back(static_cast<double>(step));
    validation.curve.y.push_back(loss);
  }
  std::vector<LegendEntry> legend = {{"training", line_class(training)}};
  if (!validation.curve.x.empty()) legend.push_back({"validation", line_class(validation)});
  for (const double mark : marks_of(run)) {
    if (mark >= from) plot.x_marks.push_back(mark);
  }
  plot.series = {std::move(training), std::move(validation)};
  plot.x_range = {from, static_cast<double>(run.last_step())};
  return html_figure("Loss, second half", legend, svg_plot(plot),
                     "The same lines with a scale of their own, without the band.");
}

std::string learning_rate_figure(const RunRecord& run) {
  if (!any_finite(run.learning_rates)) return "";
  const double high = highest(run.learning_rates);
  const int exponent = high > 0.0 ? static_cast<int>(std::floor(std::log10(high))) : 0;
  std::string power;
  for (const char c : std::to_string(exponent)) {
    static constexpr std::array<const char*, 10> kDigits = {"⁰", "¹", "²", "³", "⁴", "⁵", "⁶", "⁷", "⁸", "⁹"};
    power += c == '-' ? "⁻" : kDigits.at(static_cast<std::size_t>(c - '0'));
  }
  Curve curve;
  for (std::size_t i = 0; i < run.steps.size(); ++i) {
    curve.x.push_back(static_cast<double>(run.steps[i]));
    curve.y.push_back(run.learning_rates[i]);
  }
  return step_figure(run, "Learning rate",
                     {.id = "lr",
                      .y_label = exponent == 0 ? "" : "× 10" + power,
                      .series = {{.curve = thinned(curve), .style = 0}},
                      .y_factor = std::pow(10.0, -exponent),
                      .y_range = from_zero(run.learning_rates)},
                     {}, "As the schedule has it.");
}

std::string run_grad_norm_figure(const RunRecord& run) {
  constexpr double kLogRatio = 20.0;
  PlotSeries series{.curve = smoothed_curve(run.steps, run.grad_norms), .style = 0};
  double low = HUGE_VAL;
  for (const double value : run.grad_norms) {
    if (std::isfinite(value)) low = std::min(low, value);
  }
  Plot plot{.id = "gradnorm", .y_label = "before clipping", .log_y = highest(run.grad_norms) > kLogRatio * low};
  std::vector<LegendEntry> legend;
  std::string caption = run_smoothing_text(run);
  if (const std::optional<double> limit = run.gradient_clip()) {
    const auto clipped = std::count_if(run.grad_norms.begin(), run.grad_norms.end(),
                                       [&](double norm) { return std::isfinite(norm) && norm > *limit; });
    legend = {{"norm", line_class(series)}, {fmt::format("clipped above {:g}", *limit), "ref"}};
    plot.reference_lines = {*limit};
    caption += fmt::format(" {:.0f} % of the logged steps were clipped.",
                           100.0 * static_cast<double>(clipped) / static_cast<double>(run.steps.size()));
  }
  plot.series = {std::move(series)};
  return step_figure(run, "Gradient norm", std::move(plot), legend, caption);
}

/// Draws a quantity whose range begins at 0, because only its size matters.
std::string rate_figure(const RunRecord& run, const std::string& title, Plot plot, const std::vector<double>& values,
                        const std::string& caption) {
  if (!any_finite(values)) return "";
  plot.series = {{.curve = smoothed_curve(run.steps, values), .style = 0}};
  plot.y_range = from_zero(values);
  return step_figure(run, title, std::move(plot), {}, caption);
}

std::string memory_figure(const RunRecord& run) {
  Curve curve;
  for (std::size_t i = 0; i < run.steps.size(); ++i) {
    curve.x.push_back(static_cast<double>(run.steps[i]));
    curve.y.push_back(run.memory_bytes[i]);
  }
  return step_figure(run, "Memory",
                     {.id = "memory",
                      .y_label = "GiB",
                      .series = {{.curve = thinned(curve), .style = 0}},
                      .y_factor = 0x1p-30,
                      .y_range = from_zero(run.memory_bytes)},
                     {}, "Of this rank. On a CPU the process's highest so far; on a GPU all that is taken.");
}

/// Draws the time that each part of a step takes as areas on top of one another. The topmost is the time of no part.
std::string time_figure(const RunRecord& run) {
  if (!any_finite(run.step_seconds)) return "";
  std::vector<double> other;
  for (std::size_t i = 0; i < run.steps.size(); ++i) {
    other.push_back(std::max(0.0, run.step_seconds[i] - run.data_seconds[i] - run.forward_seconds[i] -
                                      run.backward_seconds[i] - run.optimizer_seconds[i]));
  }
  struct Part {
    const char* name;
    const std::vector<double>* seconds;
    int style;
  };
  const std::array<Part, 5> parts = {{{"forward", &run.forward_seconds, 0},
                                      {"backward", &run.backward_seconds, 1},
                                      {"optimizer", &run.optimizer_seconds, 2},
                                      {"data", &run.data_seconds, 3},
                                      {"other", &other, 4}}};
  const bool in_seconds = median(finite_of(run.step_seconds)) >= 1.0;
  Plot plot{.id = "time", .y_label = in_seconds ? "s per step" : "ms per step", .y_factor = in_seconds ? 1.0 : 1e3};
  std::vector<LegendEntry> legend;
  std::vector<double> below(points_to_draw(run.steps.size()).size(), 0.0);
  double total = 0.0;
  for (const Part& part : parts) {
    for (const double value : finite_of(*part.seconds)) total += value;
  }
  for (const Part& part : parts) {
    PlotSeries series{.curve = smoothed_curve(run.steps, *part.seconds), .style = part.style, .area = true};
    Curve& curve = series.curve;
    curve.low = below;
    for (std::size_t i = 0; i < below.size(); ++i) {
      below[i] += std::isfinite(curve.y[i]) ? curve.y[i] : 0.0;
    }
    curve.y = curve.high = below;
    double sum = 0.0;
    for (const double value : finite_of(*part.seconds)) sum += value;
    legend.push_back(
        {fmt::format("{} {:.0f} %", part.name, total > 0.0 ? 100.0 * sum / total : 0.0), line_class(series), true});
    plot.series.push_back(std::move(series));
  }
  plot.y_range = from_zero(below);
  return step_figure(run, "Where a step's time goes", std::move(plot), legend,
                     "Backward with recomputation; other is what no part accounts for. Without validation and "
                     "checkpoints.");
}

/// Lower bounds of all levels but the first. They are fixed, so that the pages of two runs have the same colours.
constexpr std::array<double, kNumHeatLevels - 1> kLoadBounds = {1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 8.0};

int level_of(double load) {
  if (!std::isfinite(load)) return -1;
  return static_cast<int>(std::upper_bound(kLoadBounds.begin(), kLoadBounds.end(), load) - kLoadBounds.begin());
}

std::string level_text(int level) {
  if (level == kNumHeatLevels - 1) return fmt::format("{:g} and more", kLoadBounds.back());
  const auto i = static_cast<std::size_t>(level);
  return fmt::format("{:g} to {:g}", i == 0 ? 1.0 : kLoadBounds.at(i - 1), kLoadBounds.at(i));
}

/// Draws, by layer and step, the tokens of each layer's busiest expert divided by the mean.
std::string expert_load_figure(const RunRecord& run) {
  constexpr std::size_t kMaxColumns = 120;
  std::size_t num_layers = 0;
  for (const auto& loads : run.expert_loads) num_layers = std::max(num_layers, loads.size());
  if (num_layers == 0) return "";
  const std::size_t num_lines = run.steps.size(), num_columns = std::min(kMaxColumns, num_lines);
  HeatMap map{.id = "experts",
              .description = "Load of the busiest expert over the mean, by layer and step",
              .x_label = "step",
              .y_label = "layer",
              .x_range = steps_of(run),
              .edges = {static_cast<double>(run.steps.front() - 1)},
              .first_row = static_cast<double>(run.first_moe_layer()),
              .levels = std::vector<std::vector<int>>(num_layers)};
  int highest_level = 0;
  for (std::size_t column = 0; column < num_columns; ++column) {
    const std::size_t begin = column * num_lines / num_columns, end = (column + 1) * num_lines / num_columns;
    map.edges.push_back(static_cast<double>(run.steps[end - 1]));
    for (std::size_t layer = 0; layer < num_layers; ++layer) {
      std::vector<double> loads;
      for (std::size_t i = begin; i < end; ++i) {
        if (layer < run.expert_loads[i].size()) loads.push_back(run.expert_loads[i][layer]);
      }
      const std::vector<double> finite = finite_of(loads);
      map.levels[layer].push_back(finite.empty() ? -1 : level_of(mean(finite)));
      highest_level = std::max(highest_level, map.levels[layer].back());
    }
  }
  std::vector<LegendEntry> legend;
  for (int level = 0; level <= highest_level; ++level) {
    legend.push_back({level_text(level), fmt::format("h{}", level), true});
  }
  return html_figure("Load of the busiest expert", legend, svg_heat_map(map),
                     "Its tokens over the mean of the layer's experts; 1 is balanced. A cell is the mean of its logged "
                     "steps. Layers of multi-token prediction are topmost.");
}

std::string checkpoint_figure(const RunRecord& run) {
  if (run.checkpoints.empty()) return "";
  PlotSeries whole{.curve = {}, .style = 0, .points = true}, stall{.curve = {}, .style = 1, .points = true};
  std::vector<double> longest, stalls;
  for (const CheckpointRecord& checkpoint : run.checkpoints) {
    const auto step = static_cast<double>(checkpoint.step);
    whole.curve.x.push_back(step);
    whole.curve.y.push_back(checkpoint.seconds);
    stall.curve.x.push_back(step);
    stall.curve.y.push_back(checkpoint.stall_seconds);
    longest.push_back(checkpoint.seconds);
    longest.push_back(checkpoint.stall_seconds);
    stalls.push_back(checkpoint.stall_seconds);
  }
  std::vector<LegendEntry> legend = {{"until it is committed", line_class(whole)},
                                     {"training waits", line_class(stall)}};
  const bool in_seconds = highest(longest) >= 1.0;
  Plot plot{.id = "checkpoints",
            .y_label = in_seconds ? "s" : "ms",
            .series = {std::move(whole), std::move(stall)},
            .y_factor = in_seconds ? 1.0 : 1e3,
            .y_range = from_zero(longest)};
  const std::string caption =
      fmt::format("{} checkpoint{}. Training waited for {} of each (median).", run.checkpoints.size(),
                  run.checkpoints.size() == 1 ? "" : "s", duration_text(median(stalls)));
  return step_figure(run, "Checkpoints", std::move(plot), legend, caption);
}

}  // namespace

std::string duration_text(double seconds) {
  constexpr double kCentury = 3.2e9;
  if (!(seconds < kCentury)) return fmt::format("{:.3g} s", seconds);  // no trainer writes such a number
  if (seconds < 1.0) return fmt::format("{:.0f} ms", 1e3 * seconds);
  if (seconds < 120.0) return fmt::format("{:.1f} s", seconds);
  const auto minutes = static_cast<std::int64_t>(std::llround(seconds / 60.0));
  if (minutes < 120) return fmt::format("{} min", minutes);
  if (minutes < 48 * 60) return fmt::format("{} h {} min", minutes / 60, minutes % 60);
  return fmt::format("{} d {} h", minutes / (24 * 60), minutes / 60 % 24);
}

std::string run_figures_html(const RunRecord& run) {
  std::string html = "<div class=\"plots\">\n";
  html += loss_figure(run) + late_loss_figure(run) + learning_rate_figure(run) + run_grad_norm_figure(run);
  html += rate_figure(run, "Tokens per second", {.id = "speed", .y_label = "per rank"}, run.tokens_per_second,
                      run_smoothing_text(run));
  html += rate_figure(run, "Model FLOP utilization (MFU)", {.id = "mfu", .y_label = "%", .y_factor = 100.0}, run.mfus,
                      run_smoothing_text(run));
  html += time_figure(run) + memory_figure(run) + expert_load_figure(run) + checkpoint_figure(run);
  SideResult errors;
  errors.label = "this run";
  add_sqnr_curves({errors.label, {run}}, errors);
  if (!errors.sqnr.empty()) html += sqnr_figures(errors, 0);
  return html + "</div>\n";
}

}  // namespace tessera
