// Balances the experts' loads without a loss (Wang et al., arXiv 2408.15664).
#pragma once

#include "ops/runtime/context.h"

namespace tessera {

/// Updates the bias from a step's counts, which are summed over all data ranks:
///   bias_E (float32) += delta - mean(delta), delta = coeff · sign(mean(counts) - counts).
/// counts_E is float64 and holds whole numbers. If finite_1 (float32, [1]) is 0, the bias stays.
void update_expert_bias(const Context& context, const Tensor& counts_E, float coeff, const Tensor& finite_1,
                        const Tensor& bias_E);

}  // namespace tessera
