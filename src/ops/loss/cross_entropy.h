// Cross-entropy of the next token, on a chunk of logits.
#pragma once

#include "ops/kit/gemm_operand.h"

namespace tessera {

/// A label that does not count.
inline constexpr std::int32_t kIgnoredLabel = -100;

// The vocabulary may be cut among ranks: a rank's logits_TV are those of the entries [first_id, first_id + V). Each
// rank sums up its own, and the sums of all ranks give the loss and the gradient. Logits are float32 or bfloat16. Sums,
// losses and everything in between are float32.

/// Assigns to sums_T3, for every row of logits, its maximum m, its sum of exp(logit - m), and the label's logit, which
/// is 0 if another rank has it. It leaves in logits_TV what cross_entropy of the same device reads. On a CPU this is
/// exp(logit - m) in place of float32 logits. bfloat16 logits stay, because rounding would harm the exponentials. A
/// GPU leaves all logits, because it computes exponentials faster than it moves them. Rows with kIgnoredLabel stay, and
/// their sums are 0.
void cross_entropy_sums(const Context& context, const Tensor& logits_TV, const Tensor& labels_T, std::int64_t first_id,
                        const Tensor& sums_T3);

/// Reads sums_PT3 of all P ranks, and what cross_entropy_sums left in this rank's logits_TV. Assigns
///   - losses_T[t] (float32) = logsumexp of all logits - the label's logit;
///   - d_logits_TV[t] = scale · (softmax - onehot(label)).
/// Both are 0 for rows with kIgnoredLabel. d_logits_TV has the forms in which GEMMs read the gradient; without any it
/// is not computed. Its plain form is float32 or bfloat16, and may be logits_TV itself. Before it is quantized, the
/// gradient has the logits' type. A label outside of [0, vocab) throws InternalError on a CPU; on a GPU its loss is
/// NaN.
void cross_entropy(const Context& context, const Tensor& sums_PT3, const Tensor& logits_TV, const Tensor& labels_T,
                   std::int64_t first_id, float scale, const Tensor& losses_T, const GemmOperand& d_logits_TV);

}  // namespace tessera
