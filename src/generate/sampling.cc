#include "generate/sampling.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/error.h"

namespace tessera {

std::int32_t sample(std::span<const float> logits, const SamplingOptions& options, double uniform,
                    std::vector<std::int32_t>& order) {
  TESSERA_CHECK(!logits.empty() && options.temperature >= 0.0 && options.top_p > 0.0);
  const auto likelier = [&](std::int32_t a, std::int32_t b) {
    const float x = logits[static_cast<std::size_t>(a)], y = logits[static_cast<std::size_t>(b)];
    return x != y ? x > y : a < b;
  };
  for (const float logit : logits) {
    require(!std::isnan(logit) && logit != HUGE_VALF, "a logit is {}: the model's weights are damaged", logit);
  }
  const float largest = *std::max_element(logits.begin(), logits.end());
  require(largest > -HUGE_VALF, "all logits are -inf: the model's weights are damaged");
  order.resize(logits.size());
  std::iota(order.begin(), order.end(), 0);
  if (options.temperature == 0.0) return *std::min_element(order.begin(), order.end(), likelier);

  std::size_t count = order.size();
  if (options.top_k > 0) count = std::min(count, static_cast<std::size_t>(options.top_k));
  // If nothing is cut off, any order is fine.
  if (count < order.size() || options.top_p < 1.0) {
    std::partial_sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(count), order.end(), likelier);
  }
  const auto weight = [&](std::size_t i) {
    return std::exp(static_cast<double>(logits[static_cast<std::size_t>(order[i])] - largest) / options.temperature);
  };
  double total = 0.0;
  for (std::size_t i = 0; i < count; ++i) total += weight(i);
  if (options.top_p < 1.0) {
    const double enough = options.top_p * total;
    total = 0.0;
    std::size_t kept = 0;
    while (kept < count && total < enough) total += weight(kept++);
    count = kept;
  }
  double left = uniform * total;
  std::int32_t token = -1;
  for (std::size_t i = 0; i < count && left >= 0.0; ++i) {
    const double probability = weight(i);
    if (probability > 0.0) token = order[i];  // if rounding leaves a rest, the last token stays
    left -= probability;
  }
  return token;
}

}  // namespace tessera
