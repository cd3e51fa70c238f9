// The points of a line in a plot. Thinning leaves few enough of them to draw.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace tessera {

inline constexpr double kSmoothing = 0.02;           // width of the moving average, as a part of the steps
inline constexpr std::size_t kMaxCurvePoints = 320;  // closer together than the moving average is wide

struct Curve {
  std::vector<double> x, y;
  std::vector<double> low, high;  // a band around y; may be empty
};

/// Returns the width of the moving average over `num_values` values: an odd number, at least 1.
std::int64_t smoothing_window(std::size_t num_values);

/// Returns at most kMaxCurvePoints of `size` indices: the first, the last and evenly spaced ones between them.
std::vector<std::size_t> points_to_draw(std::size_t size);

/// Returns the points of a curve that are drawn.
Curve thinned(const Curve& curve);

/// Returns centred moving averages of the finite values, with the lowest and the highest value of each window as band.
/// There is no band if a window is one value.
Curve smoothed_curve(const std::vector<std::int64_t>& steps, std::span<const double> values);

}  // namespace tessera
