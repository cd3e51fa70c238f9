// A line plot as inline SVG. It has no size of its own: it takes the width that it is given. Colours and dashes are
// classes ("s0", "s1", ... for lines, "b0", ... for bands), defined once by the page's style sheet.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "compare/comparison.h"

namespace tessera {

inline constexpr int kNumPlotStyles = static_cast<int>(kMaxSides);

struct PlotSeries {
  Curve curve;
  int style = 0;       // 0 to kNumPlotStyles - 1
  bool solid = false;  // without the style's dashes
};

struct Plot {
  std::string id = {};           // unique in the page
  std::string description = {};  // for readers that do not see it
  std::string x_label = {}, y_label = {};
  std::vector<PlotSeries> series = {};
  std::vector<double> reference_lines = {};               // horizontal, dotted
  double y_factor = 1.0;                                  // of the values, for display
  std::optional<std::pair<double, double>> y_range = {};  // none: all finite values
  bool log_y = false;                                     // if all values are above 0
};

/// Values of x or y that are finite are drawn; a line is interrupted by others.
std::string svg_plot(const Plot& plot);

/// Round numbers, 1, 2 or 5 times a power of ten apart, from `low` to `high`, about `count` of them; `low` alone if the
/// two are as good as the same.
std::vector<double> round_ticks(double low, double high, int count);

/// 1, 2 and 5 times powers of ten from `low` to `high`, which are above 0; only the powers if those are many.
std::vector<double> log_ticks(double low, double high);

/// The text for HTML, with its special characters replaced.
std::string html_escape(std::string_view text);

}  // namespace tessera
