#include "compare/report/report_figures.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "compare/report/html.h"
#include "compare/report/svg_plot.h"

namespace tessera {
namespace {

/// Operands have their own kinds of lines, so that no colour stands for a side in one plot and an operand in another.
constexpr int kFirstOperandStyle = 3;

std::string smoothing_text(const Comparison& comparison) {
  if (comparison.smoothing_lines <= 1) return "One point per logged step, not smoothed.";
  return fmt::format("Centred moving average over {} logged steps, {:g} % of all.", comparison.smoothing_lines,
                     100.0 * kSmoothing);
}

/// Draws a curve of each side in one plot.
std::string sides_figure(const Comparison& comparison, const std::string& title, Plot plot, Curve SideResult::*member) {
  std::vector<LegendEntry> legend;
  for (std::size_t i = 0; i < comparison.sides.size(); ++i) {
    const int style = static_cast<int>(i) % kNumPlotStyles;
    plot.series.push_back({comparison.sides[i].*member, style});
    legend.push_back({comparison.sides[i].label, line_class(plot.series.back())});
  }
  plot.x_label = "step";
  plot.description = fmt::format("{} of all sides over the steps", title);
  const char* band =
      comparison.num_seeds > 1 ? " Line: mean over the seeds. Band: from the lowest seed to the highest." : "";
  return html_figure(title, legend, svg_plot(plot), smoothing_text(comparison) + band);
}

/// Returns the range of y, with the margins in sight. Two things do not set the scale: the first steps, where losses
/// fall fast, and the band of two seeds, which is six times their scatter.
std::pair<double, double> difference_range(const Curve& curve, double margin) {
  constexpr double kFirstPart = 0.1, kRoom = 1.15, kMarginRoom = 1.6, kMaxBand = 4.0;
  double line = margin, low = 0.0, high = 0.0;
  for (std::size_t i = 0; i < curve.x.size(); ++i) {
    if (curve.x[i] < kFirstPart * curve.x.back() || !std::isfinite(curve.y[i])) continue;
    line = std::max(line, std::abs(curve.y[i]));
    const bool band = !curve.low.empty() && std::isfinite(curve.low[i]) && std::isfinite(curve.high[i]);
    low = std::min(low, band ? curve.low[i] : curve.y[i]);
    high = std::max(high, band ? curve.high[i] : curve.y[i]);
  }
  const auto bound = [&](double extent) {
    return std::max(kMarginRoom * margin, kRoom * std::min(extent, kMaxBand * line));
  };
  return {-bound(-low), bound(high)};
}

std::string difference_figure(const Comparison& comparison, std::size_t side_idx) {
  const SideResult& side = comparison.sides[side_idx];
  const std::string& baseline = comparison.sides.front().label;
  const Plot plot{
      .id = fmt::format("difference{}", side_idx),
      .description = fmt::format("Relative difference of the loss of {} to that of {}", side.label, baseline),
      .x_label = "step",
      .y_label = "%, above 0: higher loss",
      .series = {{side.difference, static_cast<int>(side_idx) % kNumPlotStyles, true}},
      .reference_lines = {-comparison.margin, comparison.margin},
      .y_factor = 100.0,
      .y_range = difference_range(side.difference, comparison.margin)};
  std::string caption = smoothing_text(comparison);
  if (comparison.num_seeds > 1) {
    caption +=
        fmt::format(" Line: mean over {} seeds. Band: {:g} % confidence interval, from the scatter of the seeds.",
                    comparison.num_seeds, 100.0 * kConfidence);
  }
  const std::vector<LegendEntry> legend = {
      {fmt::format("({0} − {1}) / {1}", side.label, baseline), line_class(plot.series[0])},
      {fmt::format("margin, ±{:g} %", 100.0 * comparison.margin), "ref"}};
  return html_figure(fmt::format("Loss of {} against {}", side.label, baseline), legend, svg_plot(plot), caption);
}

std::string grad_norm_figure(const Comparison& comparison) {
  constexpr double kLogRatio = 20.0;
  double low = HUGE_VAL, high = 0.0;
  for (const SideResult& side : comparison.sides) {
    for (const double value : side.grad_norm.y) {
      if (std::isfinite(value)) low = std::min(low, value), high = std::max(high, value);
    }
  }
  return sides_figure(comparison, "Gradient norm",
                      {.id = "gradnorm", .y_label = "before clipping", .log_y = high > kLogRatio * low},
                      &SideResult::grad_norm);
}

std::string operand_text(const std::string& operand) {
  if (operand == "x") return "x: activations";
  if (operand == "w") return "w: weights";
  if (operand == "dy") return "dy: gradients of outputs";
  return operand;
}

std::string sqnr_figure(const std::map<std::string, Curve>& curves, const std::string& title, Plot plot,
                        const std::string& caption) {
  std::vector<LegendEntry> legend;
  int style = kFirstOperandStyle;
  for (const std::string& operand : operands_of(curves)) {
    plot.series.push_back({curves.at(operand), style});
    legend.push_back({operand_text(operand), line_class(plot.series.back())});
    style = style + 1 < kNumPlotStyles ? style + 1 : 0;
  }
  plot.description = title;
  plot.y_label = "dB, higher is better";
  return html_figure(title, legend, svg_plot(plot), caption);
}

}  // namespace

std::vector<std::string> operands_of(const std::map<std::string, Curve>& curves) {
  std::vector<std::string> operands;
  for (const char* known : {"x", "w", "dy"}) {
    if (curves.contains(known)) operands.emplace_back(known);
  }
  for (const auto& [operand, curve] : curves) {
    if (std::find(operands.begin(), operands.end(), operand) == operands.end()) operands.push_back(operand);
  }
  return operands;
}

std::string sqnr_figures(const SideResult& side, std::size_t side_idx) {
  std::string html;
  html += sqnr_figure(side.sqnr, fmt::format("Quantization error (SQNR) of {}", side.label),
                      {.id = fmt::format("sqnr{}", side_idx), .x_label = "step"},
                      "Signal over quantization noise of what goes into the matrix products. Line: the median layer. "
                      "Band: from the worst layer to the best. Moving average over 2 % of the measurements.");
  if (!side.sqnr_by_layer.empty()) {
    html += sqnr_figure(side.sqnr_by_layer, fmt::format("SQNR of {} by layer", side.label),
                        {.id = fmt::format("sqnrlayer{}", side_idx), .x_label = "layer"},
                        "At the last measurement, mean over the layer's matrices and the seeds.");
  }
  return html;
}

std::string figures_html(const Comparison& comparison) {
  std::string html = "<div class=\"plots\">\n";
  html += sides_figure(comparison, "Training loss", {.id = "loss", .y_label = "cross-entropy"}, &SideResult::loss);
  for (std::size_t i = 1; i < comparison.sides.size(); ++i) html += difference_figure(comparison, i);
  html += grad_norm_figure(comparison);
  for (std::size_t i = 0; i < comparison.sides.size(); ++i) {
    if (!comparison.sides[i].sqnr.empty()) html += sqnr_figures(comparison.sides[i], i);
  }
  return html + "</div>\n";
}

}  // namespace tessera
