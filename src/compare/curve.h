// Points of a line in a plot, few enough to be drawn.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace tessera {

inline constexpr double kSmoothing = 0.02;           // width of the moving average, as a part of the steps
inline constexpr std::size_t kMaxCurvePoints = 320;  // closer together than the moving average is wide

struct Curve {
  std::vector<double> x, y;
  std::vector<double> low, high;  // a band around y; or empty
};

/// Width of the moving average over so many values: odd, 1 or more.
std::int64_t smoothing_window(std::size_t num_values);

/// Indices of the first, the last and evenly spaced ones between them: at most kMaxCurvePoints of `size`.
std::vector<std::size_t> points_to_draw(std::size_t size);

/// The points that are drawn of a curve.
Curve thinned(const Curve& curve);

/// Centred moving averages of the finite values, and the lowest and the highest value in each window as band. No band
/// where a window is one value.
Curve smoothed_curve(const std::vector<std::int64_t>& steps, std::span<const double> values);

}  // namespace tessera
