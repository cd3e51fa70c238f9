#include "compare/statistics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "base/median.h"

namespace tessera {
namespace {

// Source: NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2, critical values of Student's t.
TEST(StudentT, QuantilesOfThePublishedTable) {
  struct Row {
    double degrees, p90, p95, p975, p99, p995, p999;
  };
  for (const Row& row : {Row{1, 3.078, 6.314, 12.706, 31.821, 63.657, 318.309},
                         {2, 1.886, 2.920, 4.303, 6.965, 9.925, 22.327},
                         {3, 1.638, 2.353, 3.182, 4.541, 5.841, 10.215},
                         {4, 1.533, 2.132, 2.776, 3.747, 4.604, 7.173},
                         {9, 1.383, 1.833, 2.262, 2.821, 3.250, 4.297},
                         {30, 1.310, 1.697, 2.042, 2.457, 2.750, 3.385},
                         {100, 1.290, 1.660, 1.984, 2.364, 2.626, 3.174}}) {
    const std::pair<double, double> quantiles[] = {{0.9, row.p90},  {0.95, row.p95},   {0.975, row.p975},
                                                   {0.99, row.p99}, {0.995, row.p995}, {0.999, row.p999}};
    for (const auto& [probability, expected] : quantiles) {
      EXPECT_NEAR(student_t_quantile(probability, row.degrees), expected, 6e-4)
          << probability << ", " << row.degrees << " degrees";
    }
  }
}

TEST(StudentT, QuantilesThatHaveAFormula) {
  for (const double probability : {0.05, 0.5, 0.6, 0.95, 0.9999}) {
    const double one = std::tan(M_PI * (probability - 0.5));
    EXPECT_NEAR(student_t_quantile(probability, 1), one, 1e-9 * (1.0 + std::abs(one)));
    const double a = 2.0 * probability - 1.0, two = a * std::sqrt(2.0 / (1.0 - a * a));
    EXPECT_NEAR(student_t_quantile(probability, 2), two, 1e-9 * (1.0 + std::abs(two)));
  }
  EXPECT_NEAR(student_t_quantile(0.95, 1e6), 1.6448536, 1e-5);  // close to the normal distribution
}

TEST(Statistics, MeanDeviationMedian) {
  const std::vector<double> values = {2, 4, 4, 4, 5, 5, 7, 9};
  EXPECT_DOUBLE_EQ(mean(values), 5.0);
  EXPECT_DOUBLE_EQ(standard_deviation(values), std::sqrt(32.0 / 7.0));
  EXPECT_TRUE(std::isnan(standard_deviation(std::vector<double>{1.0})));
  EXPECT_DOUBLE_EQ(median(values), 4.5);
  EXPECT_DOUBLE_EQ(median({3, 1, 2}), 2.0);
}

TEST(Statistics, ConfidenceHalfWidth) {
  EXPECT_NEAR(confidence_half_width(1.0, 4, 0.90), 2.353363 / 2.0, 1e-6);
  EXPECT_EQ(confidence_half_width(1.0, 1, 0.90), HUGE_VAL);
}

TEST(Statistics, MovingAverage) {
  const std::vector<double> values = {1, 2, 6, 4, 7};
  EXPECT_EQ(moving_average(values, 1), values);
  EXPECT_THAT(moving_average(values, 3), ::testing::ElementsAre(1.5, 3, 4, 17.0 / 3.0, 5.5));
  EXPECT_THAT(moving_average(values, 99), ::testing::Each(4.0));
}

}  // namespace
}  // namespace tessera
