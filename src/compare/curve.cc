#include "compare/curve.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "compare/statistics.h"

namespace tessera {

std::int64_t smoothing_window(std::size_t num_values) {
  const auto width = static_cast<std::int64_t>(std::llround(kSmoothing * static_cast<double>(num_values)));
  return std::max<std::int64_t>(1, width / 2 * 2 + 1);
}

std::vector<std::size_t> points_to_draw(std::size_t size) {
  const std::size_t kept = std::min(size, kMaxCurvePoints);
  std::vector<std::size_t> points;
  for (std::size_t k = 0; k < kept; ++k) points.push_back(kept == 1 ? 0 : k * (size - 1) / (kept - 1));
  return points;
}

Curve thinned(const Curve& curve) {
  Curve result;
  for (const std::size_t i : points_to_draw(curve.x.size())) {
    result.x.push_back(curve.x[i]);
    result.y.push_back(curve.y[i]);
    if (curve.low.empty()) continue;
    result.low.push_back(curve.low[i]);
    result.high.push_back(curve.high[i]);
  }
  return result;
}

Curve smoothed_curve(const std::vector<std::int64_t>& steps, std::span<const double> values) {
  const auto half = static_cast<std::size_t>(smoothing_window(values.size()) / 2);
  Curve curve;
  for (const std::size_t i : points_to_draw(values.size())) {
    const std::size_t begin = i - std::min(i, half), end = std::min(values.size(), i + half + 1);
    const std::vector<double> window = finite_of(values.subspan(begin, end - begin));
    constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
    curve.x.push_back(static_cast<double>(steps[i]));
    curve.y.push_back(window.empty() ? kNone : mean(window));
    if (half == 0) continue;
    curve.low.push_back(window.empty() ? kNone : *std::min_element(window.begin(), window.end()));
    curve.high.push_back(window.empty() ? kNone : *std::max_element(window.begin(), window.end()));
  }
  return curve;
}

}  // namespace tessera
