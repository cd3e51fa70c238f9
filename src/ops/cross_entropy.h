// Cross-entropy of the next token, on a chunk of logits.
#pragma once

#include "ops/context.h"

namespace tessera {

/// A label that does not count.
inline constexpr std::int32_t kIgnoredLabel = -100;

// The vocabulary may be cut among ranks: logits_TV are those of the entries [first_id, first_id + V). Each rank sums up
// its own, and all ranks' sums together give loss and gradient. Logits and sums are float32.

/// Of every row of logits, sums_T3 (=) its maximum m, its sum of exp(logit - m), and the label's logit (0 if another
/// rank has it). Replaces the logits by exp(logit - m). Rows with kIgnoredLabel stay, and have sums of 0.
void cross_entropy_sums(const Context& context, const Tensor& logits_TV, const Tensor& labels_T, std::int64_t first_id,
                        const Tensor& sums_T3);

/// From all P ranks' sums_PT3, and this rank's exp(logit - m): losses_T[t] (float32) = logsumexp of all logits - the
/// label's, and d_logits_TV[t] = scale · (softmax - onehot(label)); for rows with kIgnoredLabel both are 0.
/// d_logits_TV: float32 or bfloat16, may be exps_TV itself; undefined: not computed. Throws InternalError for a label
/// outside of [0, vocab).
void cross_entropy(const Context& context, const Tensor& sums_PT3, const Tensor& exps_TV, const Tensor& labels_T,
                   std::int64_t first_id, float scale, const Tensor& losses_T, const Tensor& d_logits_TV);

}  // namespace tessera
