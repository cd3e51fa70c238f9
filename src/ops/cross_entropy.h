// Cross-entropy of the next token, on a chunk of logits.
#pragma once

#include "ops/context.h"

namespace tessera {

/// A label that does not count.
inline constexpr std::int32_t kIgnoredLabel = -100;

/// For every row t with labels_T[t] != kIgnoredLabel: losses_T[t] = logsumexp(logits[t]) - logits[t][label], and
/// d_logits_TV[t] = scale · (softmax(logits[t]) - onehot(label)); for the other rows both are 0.
/// logits_TV, losses_T: float32; logits are overwritten. d_logits_TV: float32 or bfloat16, may be logits_TV itself;
/// an undefined tensor: not computed.
void cross_entropy(const Context& context, const Tensor& logits_TV, const Tensor& labels_T, float scale,
                   const Tensor& losses_T, const Tensor& d_logits_TV);

}  // namespace tessera
