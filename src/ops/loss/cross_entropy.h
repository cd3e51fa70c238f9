// Cross-entropy of the next token, on a chunk of logits.
#pragma once

#include "ops/kit/gemm_operand.h"

namespace tessera {

/// A label that does not count.
inline constexpr std::int32_t kIgnoredLabel = -100;

// The vocabulary may be cut among ranks: logits_TV are those of the entries [first_id, first_id + V). Each rank sums up
// its own, and all ranks' sums together give loss and gradient. Logits are float32 or bfloat16. Sums, losses and all
// that is computed in between are float32.

/// Of every row of logits, sums_T3 (=) its maximum m, its sum of exp(logit - m), and the label's logit (0 if another
/// rank has it). Leaves in logits_TV what cross_entropy of the same device asks for: on a CPU exp(logit - m) in place
/// of float32 logits, else the logits. (bfloat16 would round the exponentials; a GPU computes them faster than it moves
/// them.) Rows with kIgnoredLabel stay, and have sums of 0.
void cross_entropy_sums(const Context& context, const Tensor& logits_TV, const Tensor& labels_T, std::int64_t first_id,
                        const Tensor& sums_T3);

/// From all P ranks' sums_PT3, and what cross_entropy_sums left of this rank's logits_TV: losses_T[t] (float32) =
/// logsumexp of all logits - the label's, and d_logits_TV[t] = scale · (softmax - onehot(label)); for rows with
/// kIgnoredLabel both are 0. d_logits_TV: the forms in which products read the gradient; none: it is not computed. The
/// plain form is float32 or bfloat16, and may be logits_TV itself. A gradient that is quantized has the logits' type
/// before. A label outside of [0, vocab): throws InternalError on a CPU; on a GPU its loss is NaN.
void cross_entropy(const Context& context, const Tensor& sums_PT3, const Tensor& logits_TV, const Tensor& labels_T,
                   std::int64_t first_id, float scale, const Tensor& losses_T, const GemmOperand& d_logits_TV);

}  // namespace tessera
