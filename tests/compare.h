// Compares float32 results.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <span>

namespace tessera {

/// Returns the largest absolute difference, divided by the largest absolute number of `expected`. Returns infinity if a
/// difference is NaN.
inline double relative_difference(std::span<const float> actual, std::span<const float> expected) {
  EXPECT_EQ(actual.size(), expected.size());
  double difference = 0.0, largest = 0.0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const double d = std::abs(static_cast<double>(actual[i]) - static_cast<double>(expected[i]));
    if (std::isnan(d)) return HUGE_VAL;
    difference = std::max(difference, d);
    largest = std::max(largest, std::abs(static_cast<double>(expected[i])));
  }
  return largest > 0.0 ? difference / largest : difference;
}

}  // namespace tessera
