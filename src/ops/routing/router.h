// The MoE router behind its gate: scores, choice of experts, weights, loads (DeepSeek-V3, arXiv 2412.19437,
// sec. 2.1.2).
//
//   s = sigmoid or softmax of the logits                                            (unbiased scores)
//   b = s + expert_bias; with groups, only the best `num_limited_groups` groups stay, a group's score being the sum of
//       its two highest b                                                           (selection)
//   experts = top-k of b, ties to the lower index, a NaN as 0, so that they differ in any case; weights = s of
//       those, divided by their sum + 1e-20 if route_norm, times route_scale.
// Sequence-wise balance loss (eq. 17-20): per sequence coefficient · sum over experts of f · P, with
//   f_i = E/(K·S) · #(tokens whose top-k of s, without bias and groups, holds i), P_i = mean over tokens of s_i /
//   sum(s).
// f is a constant of the gradient.
// A GPU takes up to 512 experts, 32 choices and 32 groups.
#pragma once

#include "ops/routing/score_function.h"
#include "ops/runtime/context.h"

namespace tessera {

/// Added to the weights' sum under route_norm.
inline constexpr float kRouteNormEpsilon = 1e-20f;

struct RouterOptions {
  ScoreFunction score_function = ScoreFunction::kSoftmax;
  bool route_norm = false;
  float route_scale = 1.0f;
  std::int64_t top_k = 1;
  std::int64_t num_groups = 0;  // 0: no groups
  std::int64_t num_limited_groups = 0;
  /// Token t's k-th expert is (t·K + k) mod E, of this rank's tokens; weights still come from the scores.
  bool force_load_balance = false;
  /// 0: no balance loss.
  float balance_coefficient = 0.0f;
  std::int64_t seq_len = 1;  // S
  /// Where the T tokens are, if the tokens of a sequence are cut among ranks: at `first_token` of B sequences one
  /// behind the other of which this rank's part has `tokens_per_seq` tokens each.
  std::int64_t first_token = 0;
  std::int64_t tokens_per_seq = 1;
};

struct RouterOutputs {
  Tensor scores_TE;      // float32
  Tensor expert_ids_TK;  // int32, by falling biased score
  Tensor weights_TK;     // float32
  Tensor counts_E;       // int32: (token, expert) pairs per expert
  Tensor balance_f_BE;   // float32; undefined if the balance coefficient is 0
};

/// Fills `outputs`, but for balance_f_BE, from logits_TE and expert_bias_E (float32).
void router_forward(const Context& context, const RouterOptions& options, const Tensor& logits_TE,
                    const Tensor& expert_bias_E, const RouterOutputs& outputs);

/// What the balance loss sums over a sequence's tokens, of this rank's: sums_B2E[b] (=) how often the top-k of s hold
/// each expert, and s_i / sum(s). float32; to be added up over the ranks that have the sequences' other tokens.
void balance_sums(const Context& context, const RouterOptions& options, const Tensor& scores_TE,
                  const Tensor& sums_B2E);

/// From all tokens' sums: f_BE (float32), and loss_1 (float64, [1]; undefined: not wanted) += the balance loss summed
/// over the sequences, coefficient included.
void balance_loss(const Context& context, const RouterOptions& options, const Tensor& sums_B2E, const Tensor& f_BE,
                  const Tensor& loss_1);

/// d_logits_TE (float32) from d_weights_TK (float32) and, with a balance loss, `balance_scale` times its gradient.
void router_backward(const Context& context, const RouterOptions& options, const RouterOutputs& outputs,
                     const Tensor& d_weights_TK, float balance_scale, const Tensor& d_logits_TE);

}  // namespace tessera
