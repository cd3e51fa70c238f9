// Cross-entropy of the next token, for a chunk of logits.
#pragma once

#include "ops/kit/gemm_operand.h"

namespace tessera {

/// The label of a position that does not count.
inline constexpr std::int32_t kIgnoredLabel = -100;

// The vocabulary may be sharded among ranks. Then a rank's logits_TV belong to the entries [first_id, first_id + V).
// Each rank computes its own sums, and the sums of all ranks give the loss and the gradient. Logits are float32 or
// bfloat16. Labels are int32. Sums, losses and everything in between are float32.

/// Assigns three sums to sums_T3 for every row of logits: its maximum m, its sum of exp(logit - m), and the label's
/// logit. The last one is 0 if another rank has the label. Rows with kIgnoredLabel do not change. Their sums are 0.
///
/// Leaves in logits_TV what cross_entropy of the same device reads. On a CPU this is exp(logit - m) in place of float32
/// logits. A CPU keeps bfloat16 logits, because rounding would harm the exponentials. A GPU keeps all logits, because
/// it computes exponentials faster than it moves them.
void cross_entropy_sums(const Context& context, const Tensor& logits_TV, const Tensor& labels_T, std::int64_t first_id,
                        const Tensor& sums_T3);

/// Reads sums_PT3 of all P ranks, and what cross_entropy_sums left in this rank's logits_TV. Assigns
///   - losses_T[t] (float32) = logsumexp of all logits - the label's logit;
///   - d_logits_TV[t] = scale · (softmax - onehot(label)).
/// Both are 0 for rows with kIgnoredLabel. d_logits_TV has the forms in which GEMMs read the gradient. If it has none,
/// the gradient is not computed. Its plain form is float32 or bfloat16, and may be logits_TV itself. Before the
/// gradient is quantized, it has the logits' type. For a label outside of [0, vocab), a CPU throws InternalError, and a
/// GPU makes its loss NaN.
void cross_entropy(const Context& context, const Tensor& sums_PT3, const Tensor& logits_TV, const Tensor& labels_T,
                   std::int64_t first_id, float scale, const Tensor& losses_T, const GemmOperand& d_logits_TV);

}  // namespace tessera
