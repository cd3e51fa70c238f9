// Numbers about samples, as far as comparing runs needs them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace tessera {

/// The t below which Student's distribution with `degrees` (above 0) degrees of freedom has the probability
/// `probability`, which is in (0, 1). To 1e-12, relative.
double student_t_quantile(double probability, double degrees);

/// A mean of values that come one by one.
class RunningMean {
 public:
  void add(double value) {
    sum_ += value;
    ++count_;
  }
  double mean() const { return sum_ / count_; }

 private:
  double sum_ = 0.0;
  int count_ = 0;
};

std::vector<double> finite_of(std::span<const double> values);

double mean(std::span<const double> values);
/// Returns the standard deviation of a sample, divided by n - 1. NaN for fewer than two values.
double standard_deviation(std::span<const double> values);

/// Half the width of the two-sided confidence interval of the mean of `count` values: t * sd / sqrt(n). Infinite for
/// fewer than two values.
double confidence_half_width(double standard_deviation, std::int64_t count, double confidence);

/// Centred moving average over `window` values, which is odd; over those that exist at the two ends.
std::vector<double> moving_average(std::span<const double> values, std::int64_t window);

}  // namespace tessera
