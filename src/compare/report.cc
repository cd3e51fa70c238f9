#include "compare/report.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <set>

#include "compare/report_style.h"
#include "compare/svg_plot.h"

namespace tessera {
namespace {

/// Operands have lines of their own, so that no colour stands for a side and for an operand.
constexpr int kFirstOperandStyle = 3;

struct LegendEntry {
  std::string label;
  std::string line;  // its class
};

std::string line_class(const PlotSeries& series) {
  return fmt::format("s{}{}", series.style, series.solid ? " solid" : "");
}

/// Lines of a long text break between a key's or a path's parts as well.
std::string cell_text(const std::string& text) {
  constexpr std::size_t kLong = 16;
  if (text.size() < kLong) return html_escape(text);
  std::string html;
  const std::string escaped = html_escape(text);
  for (std::size_t i = 0; i < escaped.size(); ++i) {
    html += escaped[i];
    const bool part_ends = escaped[i] == '.' || escaped[i] == '_' || escaped[i] == '/';
    if (part_ends && i + 1 < escaped.size() && std::isalpha(static_cast<unsigned char>(escaped[i + 1])) != 0) {
      html += "<wbr/>";
    }
  }
  return html;
}

/// Operands in the order of a product, unknown ones at the end.
std::vector<std::string> operands_of(const std::map<std::string, Curve>& curves) {
  std::vector<std::string> operands;
  for (const char* known : {"x", "w", "dy"}) {
    if (curves.contains(known)) operands.push_back(known);
  }
  for (const auto& [operand, curve] : curves) {
    if (std::find(operands.begin(), operands.end(), operand) == operands.end()) operands.push_back(operand);
  }
  return operands;
}

std::string figure(const std::string& title, const std::vector<LegendEntry>& legend, const Plot& plot,
                   const std::string& caption) {
  std::string html = fmt::format("<figure><h3>{}</h3>", html_escape(title));
  if (!legend.empty()) {
    html += "<p class=\"legend\">";
    for (const LegendEntry& entry : legend) {
      html += fmt::format(
          "<span><svg viewBox=\"0 0 34 12\" aria-hidden=\"true\"><path class=\"{}\" d=\"M0 6H34\"/></svg>{}</span>",
          entry.line, html_escape(entry.label));
    }
    html += "</p>";
  }
  return html + svg_plot(plot) + fmt::format("<figcaption>{}</figcaption></figure>\n", html_escape(caption));
}

std::string smoothing_text(const Comparison& comparison) {
  if (comparison.smoothing_lines <= 1) return "One point per logged step, not smoothed.";
  return fmt::format("Centred moving average over {} logged steps, {:g} % of all.", comparison.smoothing_lines,
                     100.0 * kSmoothing);
}

/// A curve of each side in one plot.
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
  return figure(title, legend, plot, smoothing_text(comparison) + band);
}

/// With the margins in sight. The first steps, where losses fall fast, and the band of two seeds, which is six times
/// their scatter, do not set the scale.
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
  return figure(fmt::format("Loss of {} against {}", side.label, baseline), legend, plot, caption);
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
  return figure(title, legend, plot, caption);
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

/// The first cell of a row is its heading.
std::string table(const std::vector<std::vector<std::string>>& rows) {
  std::string html = "<div class=\"scroll\"><table>";
  for (std::size_t r = 0; r < rows.size(); ++r) {
    html += r == 0 ? "<thead><tr>" : r == 1 ? "<tbody><tr>" : "<tr>";
    for (std::size_t c = 0; c < rows[r].size(); ++c) {
      const char* tag = r == 0 || c == 0 ? "th" : "td";
      html += fmt::format("<{0}>{1}</{0}>", tag, cell_text(rows[r][c]));
    }
    html += r == 0 ? "</tr></thead>" : "</tr>";
  }
  return html + (rows.size() > 1 ? "</tbody></table></div>\n" : "</table></div>\n");
}

std::string worst_sites_table(const SideResult& side) {
  std::vector<std::vector<std::string>> rows = {{"Matrix"}};
  const std::vector<std::string> operands = operands_of(side.sqnr);
  rows[0].insert(rows[0].end(), operands.begin(), operands.end());
  for (const WorstSite& site : side.worst_sites) {
    auto& row = rows.emplace_back(std::vector<std::string>{site.site});
    for (const std::string& operand : operands) {
      const auto found = site.sqnr.find(operand);
      row.push_back(found == site.sqnr.end() ? "" : fmt::format("{:.1f}", found->second));
    }
  }
  return fmt::format("<h2>Lowest SQNR of {}, dB, at the last measurement</h2>\n", html_escape(side.label)) +
         table(rows);
}

std::string verdict_box(const SideResult& side, const std::string& baseline) {
  const Verdict& verdict = *side.verdict;
  const char *tone = "unsure", *mark = "?";
  const char* meaning =
      "The seeds scatter too much, or are too few, for a decision. The number of seeds is what it would take if mean "
      "and "
      "scatter stayed as they are.";
  if (verdict.kind == Verdict::Kind::kEquivalent) {
    tone = "equivalent", mark = "=";
    meaning =
        "At the end of the run the losses differ by less than the margin, in either direction. The chance of "
        "saying so when it is not true is at most 5 %.";
  } else if (verdict.kind == Verdict::Kind::kWorse) {
    tone = "worse", mark = "−";
    meaning = "The loss is higher, by more than the seeds scatter and more than the margin allows.";
  } else if (verdict.kind == Verdict::Kind::kBetter) {
    tone = "better", mark = "+";
    meaning = "The loss is lower, by more than the seeds scatter and more than the margin.";
  }
  if (verdict.more_seeds > kMaxMoreSeeds) {
    meaning = "The seeds scatter too much for a decision. Longer runs and larger batches scatter less.";
  }
  if (verdict.identical) meaning = "No step of any seed has another loss, to the last bit.";
  if (verdict.broken) meaning = "A run that breaks down is worse, whatever the other seeds do.";
  if (verdict.growing) meaning = "The loss is higher, still within the margin, but the gap grows steadily.";
  // The words before a colon or a parenthesis carry the verdict.
  const std::size_t end = std::min(verdict.text.find(" ("), verdict.text.find(": "));
  const std::string head = verdict.text.substr(0, end),
                    rest = end < verdict.text.size() ? verdict.text.substr(end) : "";
  return fmt::format(
      "<section class=\"verdict {}\"><span class=\"mark\" aria-hidden=\"true\">{}</span><div><h2>{} against {}: "
      "<b>{}</b>{}</h2><p>{}</p></div></section>\n",
      tone, mark, html_escape(side.label), html_escape(baseline), html_escape(head), html_escape(rest), meaning);
}

std::string differences_table(const Comparison& comparison) {
  if (comparison.differences.empty()) return "<p>Nothing but the seeds and the folders.</p>\n";
  std::vector<std::vector<std::string>> rows = {{"Key"}};
  for (const SideResult& side : comparison.sides) rows[0].push_back(side.label);
  for (const Difference& difference : comparison.differences) {
    auto& row = rows.emplace_back(std::vector<std::string>{difference.key});
    row.insert(row.end(), difference.values.begin(), difference.values.end());
  }
  return table(rows);
}

std::string runs_table(const Comparison& comparison) {
  std::vector<std::vector<std::string>> rows = {{"Side", "Seed", "Loss at the end", "Tokens/s", "Folder"}};
  std::set<std::string> machines;
  for (const RunSummary& run : comparison.runs) {
    rows.push_back({run.side, std::to_string(run.seed), fmt::format("{:.4f}", run.final_loss),
                    fmt::format("{:.0f}", run.tokens_per_second), run.folder});
    machines.insert(fmt::format("{}, {}, tessera {}", run.processor,
                                run.threads == 1 ? "1 thread" : fmt::format("{} threads", run.threads), run.program));
  }
  return table(rows) +
         fmt::format("<p class=\"soft\">Machine: {}</p>\n", html_escape(fmt::format("{}", fmt::join(machines, "; "))));
}

std::string explanation(const Comparison& comparison) {
  return fmt::format(
      "<details><summary>How to read this</summary><ul>"
      "<li>Runs are paired by seed: both have the same initial weights and the same data in the same order.</li>"
      "<li>Per seed, the difference is that of the mean losses over the last {:g} % of the steps, relative to the "
      "baseline's.</li>"
      "<li><b>Equivalent</b>: the {:g} % confidence interval of the mean difference lies within ±{:g} % (two one-sided "
      "t-tests at 5 %).</li>"
      "<li><b>Worse</b> or <b>better</b>: the interval lies on one side of 0, and its middle is as far out as the "
      "margin "
      "or further. Also worse: a loss that is not finite, or a gap that grows so steadily that it would pass the "
      "margin "
      "if the run were twice as long.</li>"
      "<li><b>Not enough evidence</b>: anything else, and fewer than {} seeds.</li>"
      "<li>SQNR: the power of a tensor over the power of its rounding error, 10 log10, in dB. 6 dB are one bit.</li>"
      "</ul></details>\n",
      100.0 * kTail, 100.0 * kConfidence, 100.0 * comparison.margin, kMinSeeds);
}

std::string plots(const Comparison& comparison) {
  std::string html = "<div class=\"plots\">\n";
  html += sides_figure(comparison, "Training loss", {.id = "loss", .y_label = "cross-entropy"}, &SideResult::loss);
  for (std::size_t i = 1; i < comparison.sides.size(); ++i) html += difference_figure(comparison, i);
  html += grad_norm_figure(comparison);
  for (std::size_t i = 0; i < comparison.sides.size(); ++i) {
    if (!comparison.sides[i].sqnr.empty()) html += sqnr_figures(comparison.sides[i], i);
  }
  return html + "</div>\n";
}

/// No line break between a number and its "%".
std::string with_hard_spaces(std::string html) {
  for (std::size_t at = html.find(" %"); at != std::string::npos; at = html.find(" %", at)) {
    html.replace(at, 1, "\u00a0");
  }
  return html;
}

}  // namespace

std::string report_html(const Comparison& comparison) {
  const std::string& baseline = comparison.sides.front().label;
  std::vector<std::string> others;
  for (std::size_t i = 1; i < comparison.sides.size(); ++i) others.push_back(comparison.sides[i].label);
  const std::string title = html_escape(fmt::format("{} against {}", fmt::join(others, ", "), baseline));
  std::string html = fmt::format(
      "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"/>"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>"
      "<link rel=\"icon\" href=\"data:,\"/><title>{0} – tessera compare</title><style>{1}</style></head><body>\n"
      "<h1>{0}</h1>\n<p class=\"soft\">{2} steps, {3} per side, paired. Margin {4:g} % of the loss.</p>\n",
      title, kReportStyle, comparison.num_steps,
      comparison.num_seeds == 1 ? "1 seed" : fmt::format("{} seeds", comparison.num_seeds), 100.0 * comparison.margin);
  for (const SideResult& side : comparison.sides) {
    if (side.verdict) html += verdict_box(side, baseline);
  }
  html += table(summary_table(comparison));
  html += fmt::format("<p class=\"soft\">Loss at the end: mean over the last {:g} % of the steps.{}</p>\n",
                      100.0 * kTail, comparison.num_seeds > 1 ? " ±: standard deviation over the seeds." : "");
  html += "<h2>Curves</h2>\n" + plots(comparison);
  for (const SideResult& side : comparison.sides) {
    if (!side.worst_sites.empty()) html += worst_sites_table(side);
  }
  html += "<h2>What differs</h2>\n" + differences_table(comparison);
  html += "<h2>Runs</h2>\n" + runs_table(comparison);
  if (!comparison.command.empty())
    html += fmt::format("<h2>Command</h2>\n<pre><code>{}</code></pre>\n", html_escape(comparison.command));
  return with_hard_spaces(html + explanation(comparison)) + "</body></html>\n";
}

}  // namespace tessera
