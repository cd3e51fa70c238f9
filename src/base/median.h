#pragma once

#include <algorithm>
#include <limits>
#include <vector>

namespace tessera {

/// Returns the median. It is the mean of the two middle values if their number is even, and NaN if there are none.
inline double median(std::vector<double> values) {
  if (values.empty()) return std::numeric_limits<double>::quiet_NaN();
  std::ranges::sort(values);
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : 0.5 * (values[middle - 1] + values[middle]);
}

}  // namespace tessera
