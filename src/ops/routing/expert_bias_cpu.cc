#include <numeric>

#include "ops/routing/expert_bias.h"

namespace tessera::cpu {

void update_expert_bias(const Context& context, const Tensor& counts_E, float coeff, const Tensor& finite_1,
                        const Tensor& bias_E) {
  if (context.measuring() || finite_1.data<float>()[0] == 0.0f) return;
  const std::int64_t experts = bias_E.dim(0);
  const double* counts = counts_E.data<double>();
  const double mean = std::accumulate(counts, counts + experts, 0.0) / static_cast<double>(experts);
  const auto sign_of = [&](std::int64_t e) {
    const double lack = mean - counts[e];
    return lack > 0.0 ? 1.0f : (lack < 0.0 ? -1.0f : 0.0f);
  };
  float mean_sign = 0.0f;
  for (std::int64_t e = 0; e < experts; ++e) mean_sign += sign_of(e) / static_cast<float>(experts);
  for (std::int64_t e = 0; e < experts; ++e) {
    // volatile: the product is rounded before it is added, as on a GPU. A compiler may fuse the two, which rounds once.
    const volatile float change = coeff * (sign_of(e) - mean_sign);
    bias_E.data<float>()[e] += change;
  }
}

}  // namespace tessera::cpu
