// Draws line plots as inline SVG. A plot has no size of its own: it takes the width that the page gives it. Colours and
// dashes are classes, which the page's style sheet defines once: "s0", "s1", ... for lines, "b0", ... for bands, "p0",
// ... for points, "h0", ... for the levels of a heat map.
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
  bool solid = false;   // without the dashes of its style
  bool area = false;    // only the band, as a solid area
  bool points = false;  // a dot at every value, for few values
  bool joined = true;   // points are joined by a line
};

struct Plot {
  std::string id = {};           // unique in the page
  std::string description = {};  // for readers who do not see the plot
  std::string x_label = {}, y_label = {};
  std::vector<PlotSeries> series = {};
  std::vector<double> reference_lines = {};               // horizontal, dotted
  std::vector<double> x_marks = {};                       // vertical, dashed
  double y_factor = 1.0;                                  // factor of the values when they are shown
  std::optional<std::pair<double, double>> x_range = {};  // not set: all values
  std::optional<std::pair<double, double>> y_range = {};  // not set: all finite values
  bool log_y = false;                                     // a logarithmic scale, if all values are above 0
};

/// Returns the plot. It draws finite values of x and y. Other values interrupt a line.
std::string svg_plot(const Plot& plot);

/// Returns the classes of a series' line, or of its area.
std::string line_class(const PlotSeries& series);

inline constexpr int kNumHeatLevels = 8;

/// Describes a table of levels that is drawn as coloured cells. Its axes are where those of a Plot are.
struct HeatMap {
  std::string id = {}, description = {}, x_label = {}, y_label = {};
  std::pair<double, double> x_range = {};
  std::vector<double> edges = {};             // edges of the columns, ascending: one more than there are columns
  double first_row = 0.0;                     // number of the lowest row; the others follow
  std::vector<std::vector<int>> levels = {};  // by row and column, below kNumHeatLevels; -1: nothing is drawn
};

/// Returns the heat map.
std::string svg_heat_map(const HeatMap& map);

/// Returns about `count` round numbers from `low` to `high`, which are 1, 2 or 5 times a power of ten apart. Returns
/// only `low` if the two are practically equal.
std::vector<double> round_ticks(double low, double high, int count);

/// Returns 1, 2 and 5 times powers of ten from `low` to `high`, which must be above 0. If there are many powers, it
/// returns only these.
std::vector<double> log_ticks(double low, double high);

}  // namespace tessera
