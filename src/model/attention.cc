#include "model/attention.h"

#include "ops/gemm.h"
#include "ops/mla_decode.h"
#include "ops/rmsnorm.h"

namespace tessera {

Attention::Attention(Parameters& parameters, const ModelConfig& config, const std::string& prefix, std::int64_t layer)
    : compresses_queries_(config.q_lora_rank > 0) {
  const std::int64_t dim = config.dim, heads = config.n_heads, q_dim = heads * config.qk_head_dim();
  if (compresses_queries_) {
    wq_a_ = parameters.add({prefix + "wq_a.weight", {config.q_lora_rank, dim}, init_shallow()});
    q_norm_ = parameters.add({prefix + "q_norm.weight", {config.q_lora_rank}, {}});
    wq_b_ = parameters.add({prefix + "wq_b.weight", {q_dim, config.q_lora_rank}, init_shallow()});
  } else {
    wq_ = parameters.add({prefix + "wq.weight", {q_dim, dim}, init_shallow()});
  }
  wkv_a_ =
      parameters.add({prefix + "wkv_a.weight", {config.kv_lora_rank + config.qk_rope_head_dim, dim}, init_shallow()});
  kv_norm_ = parameters.add({prefix + "kv_norm.weight", {config.kv_lora_rank}, {}});
  wkv_b_ = parameters.add({prefix + "wkv_b.weight",
                           {heads * (config.qk_nope_head_dim + config.v_head_dim), config.kv_lora_rank},
                           init_shallow()});
  wo_ = parameters.add({prefix + "wo.weight", {dim, heads * config.v_head_dim}, init_by_depth(layer)});
}

MlaDims Attention::dims(const LayerContext& context) const {
  const ModelConfig& config = *context.config;
  return {.num_seqs = context.batch->num_seqs(),
          .seq_len = context.batch->seq_len(),
          .num_heads = config.n_heads,
          .dim_nope = config.qk_nope_head_dim,
          .dim_rope = config.qk_rope_head_dim,
          .dim_v = config.v_head_dim,
          .scale = config.softmax_scale(context.rope->seq_len())};
}

void Attention::rotate(const LayerContext& context, const Tensor& x, std::int64_t num_heads, RopeDirection direction,
                       const Tensor& y) const {
  const Device device = context.op.device();
  rope(context.op, x, num_heads, context.config->qk_rope_head_dim, context.batch->positions(device),
       context.rope->cos(device), context.rope->sin(device), direction, y);
}

void Attention::allocate_recomputed(const LayerContext& context, AttentionSaved& saved) const {
  const ModelConfig& config = *context.config;
  const std::int64_t num_tokens = context.num_tokens();
  saved.kv_latent_TC = context.allocate({num_tokens, config.kv_lora_rank});
  saved.kv = context.allocate({num_tokens, config.n_heads * (config.qk_nope_head_dim + config.v_head_dim)});
  saved.k_rope = context.allocate({num_tokens, config.qk_rope_head_dim});
  if (compresses_queries_) {
    saved.q_latent_TC = context.allocate({num_tokens, config.q_lora_rank});
    saved.q = context.allocate({num_tokens, config.n_heads * config.qk_head_dim()});
  }
}

void Attention::compute_recomputed(const LayerContext& context, const AttentionSaved& saved) const {
  const ModelConfig& config = *context.config;
  const std::int64_t latent = config.kv_lora_rank;
  rmsnorm_forward(context.op, saved.kv_a.columns(0, latent), context.weight(kv_norm_), config.norm_eps,
                  saved.kv_latent_TC, saved.kv_rstd_T);
  linear_forward(context.op, saved.kv_latent_TC, context.weight(wkv_b_), saved.kv);
  rotate(context, saved.kv_a.columns(latent, saved.kv_a.dim(1)), 1, RopeDirection::kForward, saved.k_rope);
  if (compresses_queries_) {
    rmsnorm_forward(context.op, saved.q_a_TC, context.weight(q_norm_), config.norm_eps, saved.q_latent_TC,
                    saved.q_rstd_T);
    linear_forward(context.op, saved.q_latent_TC, context.weight(wq_b_), saved.q);
    rotate(context, saved.q, config.n_heads, RopeDirection::kForward, saved.q);
  }
}

void Attention::forward(const LayerContext& context, const Tensor& y_TD, AttentionSaved& saved,
                        const Tensor& out_TD) const {
  const TraceScope trace(context.op.trace, "attention.forward");
  const ModelConfig& config = *context.config;
  const std::int64_t num_tokens = context.num_tokens(), heads = config.n_heads;
  saved.kv_a = context.allocate({num_tokens, config.kv_lora_rank + config.qk_rope_head_dim});
  saved.kv_rstd_T = context.allocate({num_tokens}, DType::kFloat32);
  saved.o = context.allocate({num_tokens, heads * config.v_head_dim});
  saved.lse_TH = context.allocate({num_tokens, heads}, DType::kFloat32);
  if (compresses_queries_) {
    saved.q_a_TC = context.allocate({num_tokens, config.q_lora_rank});
    saved.q_rstd_T = context.allocate({num_tokens}, DType::kFloat32);
  } else {
    saved.q = context.allocate({num_tokens, heads * config.qk_head_dim()});
  }
  if (context.recompute != Recompute::kSelective) allocate_recomputed(context, saved);
  const ArenaScope scope(*context.op.arena);
  if (context.recompute == Recompute::kSelective) allocate_recomputed(context, saved);

  linear_forward(context.op, y_TD, context.weight(wkv_a_), saved.kv_a);
  if (compresses_queries_) {
    linear_forward(context.op, y_TD, context.weight(wq_a_), saved.q_a_TC);
  } else {
    linear_forward(context.op, y_TD, context.weight(wq_), saved.q);
    rotate(context, saved.q, heads, RopeDirection::kForward, saved.q);
  }
  compute_recomputed(context, saved);
  mla_attention_forward(context.op, dims(context),
                        {.q = saved.q,
                         .kv = saved.kv,
                         .k_rope = saved.k_rope,
                         .doc_start_T = context.batch->doc_starts(context.op.device())},
                        saved.o, saved.lse_TH);
  if (out_TD.defined()) linear_forward(context.op, saved.o, context.weight(wo_), out_TD);
}

void Attention::decode(const LayerContext& context, const Tensor& y_TD, const Tensor& slot_T, const Tensor& cache_SPN,
                       const Tensor& out_TD) const {
  const TraceScope trace(context.op.trace, "attention.decode");
  const ModelConfig& config = *context.config;
  const Context& op = context.op;
  const std::int64_t num_tokens = y_TD.dim(0), heads = config.n_heads, latent = config.kv_lora_rank;
  const std::int64_t nope = config.qk_nope_head_dim, dim_v = config.v_head_dim, q_head = config.qk_head_dim();
  const Tensor positions_T = context.batch->positions(op.device());
  const ArenaScope scope(*op.arena);
  const Tensor rstd_T = context.allocate({num_tokens}, DType::kFloat32);

  const Tensor kv_a = context.allocate({num_tokens, latent + config.qk_rope_head_dim});
  const Tensor latent_TC = context.allocate({num_tokens, latent});
  const Tensor k_rope = context.allocate({num_tokens, config.qk_rope_head_dim});
  linear_forward(op, y_TD, context.weight(wkv_a_), kv_a);
  rmsnorm_forward(op, kv_a.columns(0, latent), context.weight(kv_norm_), config.norm_eps, latent_TC, rstd_T);
  rotate(context, kv_a.columns(latent, kv_a.dim(1)), 1, RopeDirection::kForward, k_rope);
  store_latents(op, latent_TC, k_rope, slot_T, positions_T, cache_SPN);

  const Tensor q = context.allocate({num_tokens, heads * q_head});
  if (compresses_queries_) {
    const Tensor q_a_TC = context.allocate({num_tokens, config.q_lora_rank});
    const Tensor q_latent_TC = context.allocate({num_tokens, config.q_lora_rank});
    linear_forward(op, y_TD, context.weight(wq_a_), q_a_TC);
    rmsnorm_forward(op, q_a_TC, context.weight(q_norm_), config.norm_eps, q_latent_TC, rstd_T);
    linear_forward(op, q_latent_TC, context.weight(wq_b_), q);
  } else {
    linear_forward(op, y_TD, context.weight(wq_), q);
  }
  rotate(context, q, heads, RopeDirection::kForward, q);

  // W_kv,b holds per head the rows of W_k (nope), then those of W_v.
  const Tensor wkv_b = context.weight(wkv_b_);
  const Tensor q_absorbed = context.allocate({num_tokens, heads * latent});
  const Tensor o_latent = context.allocate({num_tokens, heads * latent});
  const Tensor o = context.allocate({num_tokens, heads * dim_v});
  for (std::int64_t head = 0; head < heads; ++head) {
    const std::int64_t w_k = head * (nope + dim_v);
    linear_dgrad(op, q.columns(head * q_head, head * q_head + nope), wkv_b.rows(w_k, w_k + nope),
                 q_absorbed.columns(head * latent, (head + 1) * latent));
  }
  mla_decode(op,
             {.num_heads = heads,
              .dim_nope = nope,
              .dim_rope = config.qk_rope_head_dim,
              .dim_latent = latent,
              .scale = config.softmax_scale(context.rope->seq_len())},
             {.q = q, .q_latent = q_absorbed, .cache_SPN = cache_SPN, .slot_T = slot_T, .position_T = positions_T},
             o_latent);
  for (std::int64_t head = 0; head < heads; ++head) {
    const std::int64_t w_v = head * (nope + dim_v) + nope;
    linear_forward(op, o_latent.columns(head * latent, (head + 1) * latent), wkv_b.rows(w_v, w_v + dim_v),
                   o.columns(head * dim_v, (head + 1) * dim_v));
  }
  linear_forward(op, o, context.weight(wo_), out_TD);
}

void Attention::backward(const LayerContext& context, const Tensor& y_TD, const AttentionSaved& kept,
                         const Tensor& d_out_TD, const Tensor& d_y_TD) const {
  const TraceScope trace(context.op.trace, "attention.backward");
  const ModelConfig& config = *context.config;
  const Context& op = context.op;
  const std::int64_t num_tokens = context.num_tokens(), heads = config.n_heads, latent = config.kv_lora_rank;
  const ArenaScope scope(*op.arena);
  AttentionSaved saved = kept;
  if (context.recompute == Recompute::kSelective) {
    allocate_recomputed(context, saved);
    compute_recomputed(context, saved);
  }

  const Tensor d_q = context.allocate(saved.q.shape());
  const Tensor d_kv = context.allocate(saved.kv.shape());
  const Tensor d_kv_a = context.allocate(saved.kv_a.shape());
  {
    const ArenaScope core_scope(*op.arena);
    const Tensor d_o = context.allocate(saved.o.shape());
    const Tensor d_k_rope = context.allocate(saved.k_rope.shape());
    linear_wgrad(op, d_out_TD, saved.o, context.gradient(wo_));
    linear_dgrad(op, d_out_TD, context.weight(wo_), d_o);
    mla_attention_backward(
        op, dims(context),
        {.q = saved.q, .kv = saved.kv, .k_rope = saved.k_rope, .doc_start_T = context.batch->doc_starts(op.device())},
        saved.o, saved.lse_TH, d_o, d_q, d_kv, d_k_rope);
    rotate(context, d_q, heads, RopeDirection::kBackward, d_q);
    rotate(context, d_k_rope, 1, RopeDirection::kBackward, d_kv_a.columns(latent, d_kv_a.dim(1)));
  }

  const Tensor d_kv_latent_TC = context.allocate({num_tokens, latent});
  linear_wgrad(op, d_kv, saved.kv_latent_TC, context.gradient(wkv_b_));
  linear_dgrad(op, d_kv, context.weight(wkv_b_), d_kv_latent_TC);
  rmsnorm_backward(op, d_kv_latent_TC, saved.kv_a.columns(0, latent), context.weight(kv_norm_), saved.kv_rstd_T,
                   d_kv_a.columns(0, latent), Write::kAssign, context.gradient(kv_norm_));
  linear_wgrad(op, d_kv_a, y_TD, context.gradient(wkv_a_));
  linear_dgrad(op, d_kv_a, context.weight(wkv_a_), d_y_TD);

  if (!compresses_queries_) {
    linear_wgrad(op, d_q, y_TD, context.gradient(wq_));
    linear_dgrad(op, d_q, context.weight(wq_), d_y_TD, Write::kAccumulate);
    return;
  }
  const Tensor d_q_latent_TC = context.allocate(saved.q_latent_TC.shape());
  const Tensor d_q_a_TC = context.allocate(saved.q_a_TC.shape());
  linear_wgrad(op, d_q, saved.q_latent_TC, context.gradient(wq_b_));
  linear_dgrad(op, d_q, context.weight(wq_b_), d_q_latent_TC);
  rmsnorm_backward(op, d_q_latent_TC, saved.q_a_TC, context.weight(q_norm_), saved.q_rstd_T, d_q_a_TC, Write::kAssign,
                   context.gradient(q_norm_));
  linear_wgrad(op, d_q_a_TC, y_TD, context.gradient(wq_a_));
  linear_dgrad(op, d_q_a_TC, context.weight(wq_a_), d_y_TD, Write::kAccumulate);
}

}  // namespace tessera
