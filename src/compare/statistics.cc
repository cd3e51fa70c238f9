#include "compare/statistics.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace tessera {
namespace {

/// The continued fraction of the incomplete beta function, by Lentz's method (Press et al., Numerical Recipes, 6.4).
double beta_fraction(double a, double b, double x) {
  constexpr double kTiny = 1e-300;
  constexpr int kMaxTerms = 10000;
  const auto nonzero = [](double value) { return std::abs(value) < kTiny ? kTiny : value; };
  double c = 1.0, d = 1.0 / nonzero(1.0 - (a + b) * x / (a + 1.0)), result = d;
  for (int m = 1; m < kMaxTerms; ++m) {
    const double even = m * (b - m) * x / ((a + 2 * m - 1.0) * (a + 2 * m));
    d = 1.0 / nonzero(1.0 + even * d);
    c = nonzero(1.0 + even / c);
    result *= d * c;
    const double odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1.0));
    d = 1.0 / nonzero(1.0 + odd * d);
    c = nonzero(1.0 + odd / c);
    result *= d * c;
    if (std::abs(d * c - 1.0) < std::numeric_limits<double>::epsilon()) break;
  }
  return result;
}

/// The regularised incomplete beta function I_x(a, b).
double incomplete_beta(double a, double b, double x) {
  if (x <= 0.0) return 0.0;
  if (x >= 1.0) return 1.0;
  const double front =
      std::exp(std::lgamma(a + b) - std::lgamma(a) - std::lgamma(b) + a * std::log(x) + b * std::log1p(-x));
  if (x < (a + 1.0) / (a + b + 2.0)) return front * beta_fraction(a, b, x) / a;
  return 1.0 - front * beta_fraction(b, a, 1.0 - x) / b;
}

/// Probability of more than `t`, which is 0 or more.
double student_t_tail(double t, double degrees) {
  return 0.5 * incomplete_beta(0.5 * degrees, 0.5, degrees / (degrees + t * t));
}

}  // namespace

double student_t_quantile(double probability, double degrees) {
  if (probability < 0.5) return -student_t_quantile(1.0 - probability, degrees);
  const double tail = 1.0 - probability;
  double low = 0.0, high = 1.0;
  while (student_t_tail(high, degrees) > tail) {
    low = high;
    high *= 2.0;
  }
  constexpr double kPrecision = 1e-13;
  while (high - low > kPrecision * high) {
    const double middle = 0.5 * (low + high);
    (student_t_tail(middle, degrees) > tail ? low : high) = middle;
  }
  return probability == 0.5 ? 0.0 : 0.5 * (low + high);
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

double median(std::vector<double> values) {
  if (values.empty()) return std::numeric_limits<double>::quiet_NaN();
  std::sort(values.begin(), values.end());
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : 0.5 * (values[middle - 1] + values[middle]);
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
