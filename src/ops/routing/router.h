// The MoE router after its gate. It computes scores, selects experts, and returns their weights and loads (DeepSeek-V3,
// arXiv 2412.19437, sec. 2.1.2).
//
// 1. Unbiased scores: s = sigmoid or softmax of the logits.
// 2. Selection: b = s + expert_bias, and a NaN counts as 0. With groups, only the best `num_limited_groups` groups
//    stay. A group's score is the sum of its two highest b. All groups have the same number of experts.
// 3. Experts: the top-k of b, all of them different. Ties go to the lower index. At least k experts must be left.
// 4. Weights: s of these experts. With route_norm, they are divided by their sum + 1e-20. Then they are multiplied by
//    route_scale.
//
// The sequence-wise balance loss (eq. 17-20) is, per sequence, coefficient · sum over experts of f · P, with
//   f_i = E/(K·S) · #(tokens whose top-k of s, without bias and groups, contains i),
//   P_i = mean over tokens of s_i / sum(s).
// The gradient treats f as a constant.
//
// A GPU takes up to 512 experts, 32 choices and 32 groups, and otherwise throws Error.
#pragma once

#include "ops/routing/score_function.h"
#include "ops/runtime/context.h"

namespace tessera {

/// This is added to the sum of the weights under route_norm.
inline constexpr float kRouteNormEpsilon = 1e-20f;

struct RouterOptions {
  ScoreFunction score_function = ScoreFunction::kSoftmax;
  bool route_norm = false;
  float route_scale = 1.0f;
  std::int64_t top_k = 1;
  std::int64_t num_groups = 0;  // 0 means that there are no groups
  std::int64_t num_limited_groups = 0;
  /// If true, token t of this rank has (t·K + k) mod E as its k-th expert. Its weights still come from the scores.
  bool force_load_balance = false;
  /// Coefficient of the balance loss. 0 means that there is none.
  float balance_coefficient = 0.0f;
  std::int64_t seq_len = 1;  // S
  /// Position of the T tokens, for sequences whose tokens are sharded among ranks. This rank's part has
  /// `tokens_per_seq` tokens of each of B sequences, one sequence after the other. The T tokens begin at index
  /// `first_token` of it.
  std::int64_t first_token = 0;
  std::int64_t tokens_per_seq = 1;
};

struct RouterOutputs {
  Tensor scores_TE;      // float32
  Tensor expert_ids_TK;  // int32, in descending order of biased score
  Tensor weights_TK;     // float32
  Tensor counts_E;       // int32: number of (token, expert) pairs per expert
  Tensor balance_f_BE;   // float32; undefined if the balance coefficient is 0
};

/// Computes all of `outputs` except balance_f_BE, from logits_TE and expert_bias_E (float32).
void router_forward(const Context& context, const RouterOptions& options, const Tensor& logits_TE,
                    const Tensor& expert_bias_E, const RouterOutputs& outputs);

/// Computes what the balance loss sums over the tokens of a sequence, for this rank's tokens. Assigns to sums_B2E[b]
/// (float32) how often the top-k of s contain each expert, and the sums of s_i / sum(s). The caller must then add up
/// the results of all ranks that have tokens of these sequences.
void balance_sums(const Context& context, const RouterOptions& options, const Tensor& scores_TE,
                  const Tensor& sums_B2E);

/// Computes f_BE (float32) from all tokens' sums. Adds to loss_1 (float64, [1]) the balance loss summed over the
/// sequences, coefficient included. loss_1 may be undefined.
void balance_loss(const Context& context, const RouterOptions& options, const Tensor& sums_B2E, const Tensor& f_BE,
                  const Tensor& loss_1);

/// Computes d_logits_TE (float32) from d_weights_TK (float32). With a balance loss, it includes that loss's gradient
/// times `balance_scale`.
void router_backward(const Context& context, const RouterOptions& options, const RouterOutputs& outputs,
                     const Tensor& d_weights_TK, float balance_scale, const Tensor& d_logits_TE);

}  // namespace tessera
