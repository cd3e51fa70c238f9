#include "compare/statistics.h"

#include <algorithm>
#include <boost/math/distributions/students_t.hpp>
#include <cmath>
#include <limits>
#include <numeric>

namespace tessera {
double student_t_quantile(double probability, double degrees) {
  return boost::math::quantile(boost::math::students_t(degrees), probability);
}

std::vector<double> finite_of(std::span<const double> values) {
  std::vector<double> finite;
  std::copy_if(values.begin(), values.end(), std::back_inserter(finite), [](double v) { return std::isfinite(v); });
  return finite;
}

double mean(std::span<const double> values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

double standard_deviation(std::span<const double> values) {
  const double centre = mean(values);
  double squares = 0.0;
  for (const double value : values) squares += (value - centre) * (value - centre);
  return std::sqrt(squares / (static_cast<double>(values.size()) - 1.0));
}

double confidence_half_width(double standard_deviation, std::int64_t count, double confidence) {
  if (count < 2) return std::numeric_limits<double>::infinity();
  const double n = static_cast<double>(count);
  return student_t_quantile(0.5 + 0.5 * confidence, n - 1.0) * standard_deviation / std::sqrt(n);
}

std::vector<double> moving_average(std::span<const double> values, std::int64_t window) {
  const auto size = static_cast<std::int64_t>(values.size());
  std::vector<double> result(values.size());
  for (std::int64_t i = 0; i < size; ++i) {
    const std::int64_t begin = std::max<std::int64_t>(0, i - window / 2), end = std::min(size, i + window / 2 + 1);
    result[static_cast<std::size_t>(i)] =
        mean(values.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(end - begin)));
  }
  return result;
}

}  // namespace tessera
