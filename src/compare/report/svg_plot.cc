#include "compare/report/svg_plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "compare/report/html.h"

namespace tessera {
namespace {

// Sizes are in units of the view box. A phone leaves 358 px, at which text of 22 units is 11 px high.
constexpr double kWidth = 720, kHeight = 400, kLeft = 92, kRight = 16, kTop = 34, kBottom = 62;

constexpr double kPoint = 1e-9;  // part of a value: numbers that are closer than this count as equal

/// Maps values to units of the view box.
struct Axis {
  double low, high, begin, end;
  bool log = false;

  double operator()(double value) const {
    const double part =
        log ? (std::log(value) - std::log(low)) / (std::log(high) - std::log(low)) : (value - low) / (high - low);
    // Points that are far outside are clipped anyway, and huge numbers are no valid coordinates.
    return begin + std::clamp(part, -10.0, 10.0) * (end - begin);
  }
};

struct Range {
  double low = HUGE_VAL, high = -HUGE_VAL;
  void add(double value) {
    if (!std::isfinite(value)) return;
    low = std::min(low, value);
    high = std::max(high, value);
  }
  /// Returns whether the range is practically one value. No ticks fit between two numbers that differ only in their
  /// last bits.
  bool is_point() const { return high - low <= kPoint * std::max(std::abs(low), std::abs(high)); }
  /// Returns a wider range, which is never empty and never one value.
  Range widened(double margin) const {
    if (low > high) return {0.0, 1.0};
    const double spare = !is_point() ? margin * (high - low) : std::max(0.05 * std::abs(high), 1e-6);
    return {low - spare, high + spare};
  }
};

Axis x_axis(const Plot& plot) {
  if (plot.x_range) return {plot.x_range->first, plot.x_range->second, kLeft, kWidth - kRight};
  Range range;
  for (const PlotSeries& series : plot.series) {
    for (const double x : series.curve.x) range.add(x);
  }
  if (range.low > range.high) range = {0.0, 1.0};
  if (range.is_point()) range = range.widened(0.0);
  return {range.low, range.high, kLeft, kWidth - kRight};
}

Axis y_axis(const Plot& plot) {
  constexpr double kSpare = 0.06;
  Range range;
  for (const PlotSeries& series : plot.series) {
    for (const auto* values : {&series.curve.y, &series.curve.low, &series.curve.high}) {
      for (const double value : *values) range.add(value);
    }
  }
  const bool log = plot.log_y && range.low > 0.0 && !range.is_point();
  if (plot.y_range) {
    range = {plot.y_range->first, plot.y_range->second};
  } else if (log) {
    const double factor = std::pow(range.high / range.low, kSpare);
    range = {std::max(range.low / factor, std::numeric_limits<double>::min()),
             std::min(range.high * factor, std::numeric_limits<double>::max())};
  } else {
    range = range.widened(kSpare);
  }
  return {range.low * plot.y_factor, range.high * plot.y_factor, kHeight - kBottom, kTop, log};
}

/// Returns ticks at whole numbers only, for steps and layers.
std::vector<double> whole_ticks(double low, double high, int count) {
  std::vector<double> ticks = round_ticks(low, high, count);
  if (ticks.size() < 2 || ticks[1] - ticks[0] >= 1.0) return ticks;
  std::vector<double> whole;
  for (double tick = std::ceil(low); tick <= high; tick += 1.0) whole.push_back(tick);
  return whole;
}

/// Returns the path "M x y L x y ..." through the finite points.
std::string line_path(const Curve& curve, const Axis& x, const Axis& y, double factor) {
  std::string path;
  bool drawing = false;
  for (std::size_t i = 0; i < curve.x.size(); ++i) {
    const bool finite = std::isfinite(curve.y[i]);
    if (finite) path += fmt::format("{}{:.1f} {:.1f}", drawing ? "L" : "M", x(curve.x[i]), y(curve.y[i] * factor));
    drawing = finite;
  }
  return path;
}

/// Returns the outline of the band: forth along its upper edge and back along its lower edge.
std::string band_path(const Curve& curve, const Axis& x, const Axis& y, double factor) {
  std::string forth, back;
  for (std::size_t i = 0; i < curve.low.size(); ++i) {
    if (!std::isfinite(curve.low[i]) || !std::isfinite(curve.high[i])) continue;
    forth += fmt::format("{}{:.1f} {:.1f}", forth.empty() ? "M" : "L", x(curve.x[i]), y(curve.high[i] * factor));
    back.insert(0, fmt::format("L{:.1f} {:.1f}", x(curve.x[i]), y(curve.low[i] * factor)));
  }
  return forth.empty() ? "" : forth + back + "Z";
}

/// Returns a tick's text, with as many decimals as the distance of the ticks needs. If all ticks are whole thousands,
/// it uses "k".
std::string tick_text(double value, double distance, bool thousands) {
  if (thousands) return value == 0.0 ? "0" : fmt::format("{:g}k", value / 1000.0);
  const int decimals = std::clamp(static_cast<int>(-std::floor(std::log10(distance) + 1e-9)), 0, 9);
  return fmt::format("{}{:.{}f}", value < 0.0 ? "−" : "", std::abs(value), decimals);
}

std::vector<std::string> tick_texts(const std::vector<double>& ticks, bool log) {
  std::vector<std::string> texts;
  const double distance = ticks.size() > 1 ? ticks[1] - ticks[0] : 1.0;
  const bool thousands =
      !ticks.empty() && ticks.back() >= 10'000.0 &&
      std::all_of(ticks.begin(), ticks.end(), [](double tick) { return std::fmod(tick, 1000.0) == 0.0; });
  for (const double tick : ticks)
    texts.push_back(log ? fmt::format("{:g}", tick) : tick_text(tick, distance, thousands));
  return texts;
}

struct AxisLabels {
  std::string x, y;
  bool whole_y = false;  // ticks of y are at whole numbers only
  bool grid = true;
};

std::string draw_axes(const AxisLabels& labels, const Axis& x, const Axis& y) {
  constexpr int kTicks = 5;
  std::string svg;
  const std::vector<double> y_ticks = y.log            ? log_ticks(y.low, y.high)
                                      : labels.whole_y ? whole_ticks(y.low, y.high, kTicks)
                                                       : round_ticks(y.low, y.high, kTicks);
  const std::vector<std::string> y_texts = tick_texts(y_ticks, y.log);
  for (std::size_t i = 0; i < y_ticks.size(); ++i) {
    const double at = y(y_ticks[i]);
    if (labels.grid) svg += fmt::format("<path class=\"grid\" d=\"M{} {:.1f}H{}\"/>", kLeft, at, kWidth - kRight);
    svg += fmt::format("<text class=\"ty\" x=\"{}\" y=\"{:.1f}\">{}</text>", kLeft - 10, at + 7, y_texts[i]);
  }
  const std::vector<double> x_ticks = whole_ticks(x.low, x.high, kTicks);
  const std::vector<std::string> x_texts = tick_texts(x_ticks, false);
  for (std::size_t i = 0; i < x_ticks.size(); ++i) {
    const double at = x(x_ticks[i]);
    svg += fmt::format("<path class=\"axis\" d=\"M{:.1f} {}v6\"/>", at, kHeight - kBottom);
    // A centred text in the corner would leave the picture.
    const char* anchor = at > kWidth - kRight - 30 ? "te" : "tx";
    svg += fmt::format("<text class=\"{}\" x=\"{:.1f}\" y=\"{}\">{}</text>", anchor,
                       anchor[1] == 'e' ? kWidth - kRight : at, kHeight - kBottom + 29, x_texts[i]);
  }
  svg += fmt::format("<path class=\"axis\" d=\"M{} {}V{}H{}\"/>", kLeft, kTop, kHeight - kBottom, kWidth - kRight);
  svg += fmt::format("<text class=\"tx\" x=\"{}\" y=\"{}\">{}</text>", (kLeft + kWidth - kRight) / 2, kHeight - 6,
                     html_escape(labels.x));
  svg += fmt::format("<text class=\"tl\" x=\"6\" y=\"{}\">{}</text>", kTop - 13, html_escape(labels.y));
  return svg;
}

/// Returns the begin of the SVG element, including the clip path that clips what is drawn to the area within the axes.
std::string begin_svg(const std::string& id, const std::string& description) {
  return fmt::format(
      "<svg viewBox=\"0 0 {0} {1}\" role=\"img\" aria-label=\"{2}\"><clipPath id=\"{3}\"><rect x=\"{4}\" y=\"{5}\" "
      "width=\"{6}\" height=\"{7}\"/></clipPath>",
      kWidth, kHeight, html_escape(description), id, kLeft, kTop, kWidth - kLeft - kRight, kHeight - kTop - kBottom);
}

std::string points_of(const Curve& curve, const Axis& x, const Axis& y, double factor, int style) {
  std::string svg;
  for (std::size_t i = 0; i < curve.x.size(); ++i) {
    const double value = curve.y[i] * factor;
    if (!std::isfinite(value) || curve.x[i] < x.low || curve.x[i] > x.high || value < y.low || value > y.high) continue;
    svg += fmt::format("<circle class=\"p{}\" cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"5\"/>", style, x(curve.x[i]), y(value));
  }
  return svg;
}

}  // namespace

std::string line_class(const PlotSeries& series) {
  if (series.area) return fmt::format("b{} area", series.style);
  return fmt::format("s{}{}", series.style, series.solid ? " solid" : "");
}

std::vector<double> round_ticks(double low, double high, int count) {
  if (Range{low, high}.is_point()) return {low};
  const double raw = (high - low) / count, power = std::pow(10.0, std::floor(std::log10(raw)));
  const double digit = raw / power, step = power * (digit <= 1.0   ? 1.0
                                                    : digit <= 2.0 ? 2.0
                                                    : digit <= 5.0 ? 5.0
                                                                   : 10.0);
  std::vector<double> ticks;
  const double tolerance = 1e-9 * step, first = std::ceil((low - tolerance) / step);
  for (int i = 0; i <= 2 * count && (first + i) * step <= high + tolerance; ++i) ticks.push_back((first + i) * step);
  return ticks;
}

std::vector<double> log_ticks(double low, double high) {
  constexpr double kManyDecades = 2.5;
  const double decades = std::log10(high / low);
  std::vector<double> ticks;
  for (double power = std::floor(std::log10(low)); power <= std::ceil(std::log10(high)); power += 1.0) {
    for (const double digit : {1.0, 2.0, 5.0}) {
      const double tick = digit * std::pow(10.0, power);
      if (tick >= low && tick <= high && (digit == 1.0 || decades < kManyDecades)) ticks.push_back(tick);
    }
  }
  return ticks;
}

std::string svg_plot(const Plot& plot) {
  const Axis x = x_axis(plot), y = y_axis(plot);
  std::string svg = begin_svg(plot.id, plot.description) + draw_axes({.x = plot.x_label, .y = plot.y_label}, x, y);
  svg += fmt::format("<g clip-path=\"url(#{})\">", plot.id);
  for (const double mark : plot.x_marks) {
    svg += fmt::format("<path class=\"mark-x\" d=\"M{:.1f} {}V{}\"/>", x(mark), kTop, kHeight - kBottom);
  }
  for (const double line : plot.reference_lines) {
    svg += fmt::format("<path class=\"ref\" d=\"M{} {:.1f}H{}\"/>", kLeft, y(line * plot.y_factor), kWidth - kRight);
  }
  for (const PlotSeries& series : plot.series) {
    const std::string path = band_path(series.curve, x, y, plot.y_factor);
    const char* area = series.area ? " area" : "";
    if (!path.empty()) svg += fmt::format("<path class=\"b{}{}\" d=\"{}\"/>", series.style, area, path);
  }
  for (const PlotSeries& series : plot.series) {
    if (series.area || !series.joined) continue;
    svg +=
        fmt::format("<path class=\"{}\" d=\"{}\"/>", line_class(series), line_path(series.curve, x, y, plot.y_factor));
  }
  svg += "</g>";
  for (const PlotSeries& series : plot.series) {
    if (series.points) svg += points_of(series.curve, x, y, plot.y_factor, series.style);  // whole at the edges, too
  }
  return svg + "</svg>";
}

std::string svg_heat_map(const HeatMap& map) {
  const double half = 0.5;  // half of a row's height
  const Axis x{map.x_range.first, map.x_range.second, kLeft, kWidth - kRight};
  const Axis y{map.first_row - half, map.first_row + static_cast<double>(map.levels.size()) - half, kHeight - kBottom,
               kTop};
  std::vector<std::string> paths(kNumHeatLevels);
  for (std::size_t row = 0; row < map.levels.size(); ++row) {
    const std::vector<int>& levels = map.levels[row];
    const double middle = map.first_row + static_cast<double>(row);
    for (std::size_t begin = 0; begin < levels.size();) {
      std::size_t end = begin + 1;
      while (end < levels.size() && levels[end] == levels[begin]) ++end;  // neighbours of one colour are one shape
      if (levels[begin] >= 0) {
        paths.at(static_cast<std::size_t>(levels[begin])) +=
            fmt::format("M{:.1f} {:.1f}H{:.1f}V{:.1f}H{:.1f}z", x(map.edges[begin]), y(middle - half),
                        x(map.edges[end]), y(middle + half), x(map.edges[begin]));
      }
      begin = end;
    }
  }
  std::string svg = begin_svg(map.id, map.description) + fmt::format("<g clip-path=\"url(#{})\">", map.id);
  for (std::size_t level = 0; level < paths.size(); ++level) {
    if (!paths[level].empty()) svg += fmt::format("<path class=\"h{}\" d=\"{}\"/>", level, paths[level]);
  }
  return svg + "</g>" + draw_axes({.x = map.x_label, .y = map.y_label, .whole_y = true, .grid = false}, x, y) +
         "</svg>";
}

}  // namespace tessera
