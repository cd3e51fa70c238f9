// A line plot as inline SVG. It has no size of its own: it takes the width that it is given. Colours and dashes are
// classes ("s0", "s1", ... for lines, "b0", ... for bands, "p0", ... for points, "h0", ... for the levels of a heat
// map), defined once by the page's style sheet.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "compare/comparison.h"

namespace tessera {

inline constexpr int kNumPlotStyles = static_cast<int>(kMaxSides);

struct PlotSeries {
  Curve curve;
  int style = 0;        // 0 to kNumPlotStyles - 1
  bool solid = false;   // without the style's dashes
  bool area = false;    // the band alone, as a solid area
  bool points = false;  // a dot at every value, for values that are few
};

struct Plot {
  std::string id = {};           // unique in the page
  std::string description = {};  // for readers that do not see it
  std::string x_label = {}, y_label = {};
  std::vector<PlotSeries> series = {};
  std::vector<double> reference_lines = {};               // horizontal, dotted
  std::vector<double> x_marks = {};                       // vertical, dashed
  double y_factor = 1.0;                                  // of the values, for display
  std::optional<std::pair<double, double>> x_range = {};  // none: all values
  std::optional<std::pair<double, double>> y_range = {};  // none: all finite values
  bool log_y = false;                                     // if all values are above 0
};

/// Values of x or y that are finite are drawn; a line is interrupted by others.
std::string svg_plot(const Plot& plot);

/// Classes of a series' line, or of its area.
std::string line_class(const PlotSeries& series);

inline constexpr int kNumHeatLevels = 8;

/// A table of levels as coloured cells. Its axes lie where those of a Plot do.
struct HeatMap {
  std::string id = {}, description = {}, x_label = {}, y_label = {};
  std::pair<double, double> x_range = {};
  std::vector<double> edges = {};             // of the columns, ascending: one more than there are columns
  double first_row = 0.0;                     // number of the lowest row; the others follow
  std::vector<std::vector<int>> levels = {};  // per row and column, below kNumHeatLevels; -1: nothing is drawn
};

std::string svg_heat_map(const HeatMap& map);

/// Round numbers, 1, 2 or 5 times a power of ten apart, from `low` to `high`, about `count` of them; `low` alone if the
/// two are as good as the same.
std::vector<double> round_ticks(double low, double high, int count);

/// 1, 2 and 5 times powers of ten from `low` to `high`, which are above 0; only the powers if those are many.
std::vector<double> log_ticks(double low, double high);

}  // namespace tessera
