// Statistics of samples, as far as the comparison of runs needs them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace tessera {

/// Returns the t below which Student's distribution with `degrees` (above 0) degrees of freedom has the probability
/// `probability`, which is in (0, 1). The relative error is at most 1e-12.
double student_t_quantile(double probability, double degrees);

/// Computes the mean of values that are added one by one.
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

/// Returns the values that are finite.
std::vector<double> finite_of(std::span<const double> values);

/// Returns the mean, which is NaN for no values.
double mean(std::span<const double> values);
/// Returns the standard deviation of a sample, with divisor n - 1. It is NaN for fewer than two values.
double standard_deviation(std::span<const double> values);

/// Returns half the width of the two-sided confidence interval of the mean of `count` values: t * sd / sqrt(n). It is
/// infinite for fewer than two values.
double confidence_half_width(double standard_deviation, std::int64_t count, double confidence);

/// Returns the centred moving average over `window` values, which is odd. At the two ends it uses the values that
/// exist.
std::vector<double> moving_average(std::span<const double> values, std::int64_t window);

}  // namespace tessera
