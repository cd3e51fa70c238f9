#include "ops/routing/router.h"

#include "ops/kit/checks.h"
#include "ops/runtime/backends.h"
#include "tensor/dims.h"

namespace tessera {

TESSERA_BACKENDS(router_forward)
TESSERA_BACKENDS(balance_sums)
TESSERA_BACKENDS(balance_loss)
TESSERA_BACKENDS(router_backward)

namespace {

void check_outputs(const RouterOptions& options, const RouterOutputs& outputs, std::int64_t num_tokens,
                   std::int64_t num_experts) {
  const std::int64_t top_k = options.top_k, groups = options.num_groups;
  TESSERA_CHECK(groups == 0 || num_experts % groups == 0, "{} experts, {} groups", num_experts, groups);
  const std::int64_t chosen_from = groups == 0 ? num_experts : num_experts / groups * options.num_limited_groups;
  TESSERA_CHECK(top_k <= chosen_from, "top {} of {} experts", top_k, chosen_from);
  TESSERA_CHECK_TENSOR(outputs.scores_TE, DType::kFloat32, {num_tokens, num_experts});
  TESSERA_CHECK_TENSOR(outputs.expert_ids_TK, DType::kInt32, {num_tokens, top_k});
  TESSERA_CHECK_TENSOR(outputs.weights_TK, DType::kFloat32, {num_tokens, top_k});
  TESSERA_CHECK_TENSOR(outputs.counts_E, DType::kInt32, {num_experts});
}

}  // namespace

void router_forward(const Context& context, const RouterOptions& options, const Tensor& logits_TE,
                    const Tensor& expert_bias_E, const RouterOutputs& outputs) {
  const TraceScope trace(context.trace, "router.forward");
  TESSERA_DIMS(logits_TE, expert_bias_E);
  const std::int64_t num_tokens = logits_TE.dim(0), num_experts = logits_TE.dim(1);
  TESSERA_CHECK_TENSOR(logits_TE, DType::kFloat32, {num_tokens, num_experts});
  TESSERA_CHECK_TENSOR(expert_bias_E, DType::kFloat32, {num_experts});
  check_outputs(options, outputs, num_tokens, num_experts);
  TESSERA_RUN(router_forward, context, options, logits_TE, expert_bias_E, outputs);
}

void balance_sums(const Context& context, const RouterOptions& options, const Tensor& scores_TE,
                  const Tensor& sums_B2E) {
  const TraceScope trace(context.trace, "router.balance_sums");
  TESSERA_DIMS(scores_TE, sums_B2E);
  const std::int64_t num_tokens = scores_TE.dim(0), num_experts = scores_TE.dim(1), num_seqs = sums_B2E.dim(0);
  const std::int64_t first = options.first_token, per_seq = options.tokens_per_seq;
  TESSERA_CHECK_TENSOR(scores_TE, DType::kFloat32, {num_tokens, num_experts});
  TESSERA_CHECK_TENSOR(sums_B2E, DType::kFloat32, {num_seqs, 2, num_experts});
  TESSERA_CHECK(first + num_tokens <= num_seqs * per_seq, "{} + {} tokens, {} x {}", first, num_tokens, num_seqs,
                per_seq);
  TESSERA_RUN(balance_sums, context, options, scores_TE, sums_B2E);
}

void balance_loss(const Context& context, const RouterOptions& options, const Tensor& sums_B2E, const Tensor& f_BE,
                  const Tensor& loss_1) {
  const TraceScope trace(context.trace, "router.balance_loss");
  TESSERA_DIMS(sums_B2E, f_BE, loss_1);
  const std::int64_t num_seqs = sums_B2E.dim(0), num_experts = sums_B2E.dim(2);
  TESSERA_CHECK_TENSOR(sums_B2E, DType::kFloat32, {num_seqs, 2, num_experts});
  TESSERA_CHECK_TENSOR(f_BE, DType::kFloat32, {num_seqs, num_experts});
  if (loss_1.defined()) TESSERA_CHECK_TENSOR(loss_1, DType::kFloat64, {1});
  TESSERA_RUN(balance_loss, context, options, sums_B2E, f_BE, loss_1);
}

void router_backward(const Context& context, const RouterOptions& options, const RouterOutputs& outputs,
                     const Tensor& d_weights_TK, float balance_scale, const Tensor& d_logits_TE) {
  const TraceScope trace(context.trace, "router.backward");
  TESSERA_DIMS(d_weights_TK, d_logits_TE);
  const std::int64_t num_tokens = d_logits_TE.dim(0), num_experts = d_logits_TE.dim(1), top_k = options.top_k;
  TESSERA_CHECK_TENSOR(d_weights_TK, DType::kFloat32, {num_tokens, top_k});
  TESSERA_CHECK_TENSOR(d_logits_TE, DType::kFloat32, {num_tokens, num_experts});
  check_outputs(options, outputs, num_tokens, num_experts);
  if (options.balance_coefficient != 0.0f) {
    const Tensor& f_BE = outputs.balance_f_BE;
    TESSERA_CHECK_TENSOR(f_BE, DType::kFloat32, {f_BE.dim(0), num_experts});
    TESSERA_CHECK(options.first_token + num_tokens <= f_BE.dim(0) * options.tokens_per_seq, "{} + {} tokens, {} x {}",
                  options.first_token, num_tokens, f_BE.dim(0), options.tokens_per_seq);
  }
  TESSERA_RUN(router_backward, context, options, outputs, d_weights_TK, balance_scale, d_logits_TE);
}

}  // namespace tessera
