#include "model/attention.h"

#include <optional>

#include "model/token_exchange.h"
#include "ops/attention/mla_decode.h"
#include "ops/norm/rmsnorm.h"
#include "tensor/dims.h"

namespace tessera {

Attention::Attention(Parameters& parameters, const ModelConfig& config, const std::string& prefix, std::int64_t layer)
    : compresses_queries_(config.q_lora_rank > 0) {
  const std::int64_t dim = config.dim, heads = config.n_heads, q_dim = heads * config.qk_head_dim();
  const auto add = [&](const char* name, Shape shape, Init init, std::optional<int> cut_dim) {
    const Cut cut = cut_dim ? Cut{.axis = Cut::Axis::kTensor, .dim = *cut_dim} : Cut{};
    return parameters.add({.name = prefix + name, .shape = shape, .init = init, .gemm = GemmKind::kLinear, .cut = cut});
  };
  // Rows and columns of heads are cut; what a token has one of is not.
  if (compresses_queries_) {
    wq_a_ = add("wq_a.weight", {config.q_lora_rank, dim}, init_shallow(), {});
    q_norm_ = parameters.add({prefix + "q_norm.weight", {config.q_lora_rank}, {}});
    wq_b_ = add("wq_b.weight", {q_dim, config.q_lora_rank}, init_shallow(), 0);
  } else {
    wq_ = add("wq.weight", {q_dim, dim}, init_shallow(), 0);
  }
  wkv_a_ = add("wkv_a.weight", {config.kv_lora_rank + config.qk_rope_head_dim, dim}, init_shallow(), {});
  kv_norm_ = parameters.add({prefix + "kv_norm.weight", {config.kv_lora_rank}, {}});
  wkv_b_ = add("wkv_b.weight", {heads * (config.qk_nope_head_dim + config.v_head_dim), config.kv_lora_rank},
               init_shallow(), 0);
  wo_ = add("wo.weight", {dim, heads * config.v_head_dim}, init_by_depth(layer), 1);
}

namespace {
/// The heads that this rank has.
std::int64_t num_heads(const LayerContext& context) { return context.config->n_heads / context.mesh->degrees.tp; }

std::int64_t num_keys(const LayerContext& context) { return context.batch->num_seqs() * context.batch->seq_len(); }

/// The norm of this rank's tokens' latents, then all ranks' by gather(norm, out). On one rank the norm itself writes
/// the forms that are wanted.
template <typename Gather>
GemmOperand normed_latents(const LayerContext& context, const Tensor& latent_tC, ParamId norm, const Tensor& rstd_t,
                           const OperandForms& forms, const GemmOperand& have, std::int64_t num_rows, bool are_cut,
                           Gather&& gather) {
  const float eps = context.config->norm_eps;
  if (!are_cut) {
    const GemmOperand y = allocate_operand(context, latent_tC.shape(), forms, have);
    rmsnorm_forward(context.op, latent_tC, context.weight(norm), eps, y, rstd_t);
    return y;
  }
  const Tensor y_tC = context.allocate(latent_tC.shape());
  rmsnorm_forward(context.op, latent_tC, context.weight(norm), eps, y_tC, rstd_t);
  const Tensor y = have.plain.defined() ? have.plain : context.allocate({num_rows, latent_tC.dim(1)});
  gather(y_tC, y);
  return quantized_operand(context, y, forms, have);
}
}  // namespace

MlaDims Attention::dims(const LayerContext& context) const {
  const ModelConfig& config = *context.config;
  return {.num_seqs = context.batch->num_seqs(),
          .seq_len = context.batch->seq_len(),
          .num_heads = num_heads(context),
          .dim_nope = config.qk_nope_head_dim,
          .dim_rope = config.qk_rope_head_dim,
          .dim_v = config.v_head_dim,
          .scale = config.softmax_scale(context.rope->seq_len()),
          .queries = context.batch->ranges(),
          .whole_sequences = config.attn_mask_type == AttentionMask::kCausal};
}

MlaOperands Attention::core_operands(const LayerContext& context, const AttentionSaved& saved) const {
  return {.q = saved.q,
          .kv = saved.kv,
          .k_rope = saved.k_rope,
          .doc_start_T = context.batch->doc_starts(context.op.device())};
}

void Attention::rotate(const LayerContext& context, const Tensor& x, const Tensor& positions, std::int64_t num_heads,
                       RopeDirection direction, const Tensor& y) const {
  const Device device = context.op.device();
  rope(context.op, x, num_heads, context.config->qk_rope_head_dim, positions, context.rope->cos(device),
       context.rope->sin(device), direction, y);
}

InputForms Attention::y_forms(const LayerContext& context) const {
  // The queries' projection reads all T tokens.
  if (!compresses_queries_ && tokens_are_cut(context)) {
    const InputForms local = input_forms(context, {wkv_a_}), all = gathered_forms(context, {wq_});
    return {.forward = local.forward | all.forward, .wgrad = local.wgrad | all.wgrad};
  }
  return input_forms(context, {compresses_queries_ ? wq_a_ : wq_, wkv_a_});
}

void Attention::allocate_recomputed(const LayerContext& context, AttentionSaved& saved) const {
  const ModelConfig& config = *context.config;
  const std::int64_t heads = num_heads(context);
  saved.kv = context.allocate({num_keys(context), heads * (config.qk_nope_head_dim + config.v_head_dim)});
  saved.k_rope = context.allocate({num_keys(context), config.qk_rope_head_dim});
  if (compresses_queries_) saved.q = context.allocate({context.num_tokens(), heads * config.qk_head_dim()});
}

void Attention::allocate_saved(const LayerContext& context, AttentionSaved& saved) const {
  const ModelConfig& config = *context.config;
  const std::int64_t num_tokens = context.num_tokens(), heads = num_heads(context);
  const std::int64_t num_local = context.num_local_tokens();
  saved = {};
  saved.kv_a_tC = context.allocate({num_local, config.kv_lora_rank + config.qk_rope_head_dim});
  saved.kv_rstd_t = context.allocate({num_local}, DType::kFloat32);
  OperandForms o_forms = input_forms(context, {wo_}).wgrad;
  o_forms.plain = true;  // for the attention core's backward
  saved.o = allocate_operand(context, {num_tokens, heads * config.v_head_dim}, o_forms);
  saved.lse_TH = context.allocate({num_tokens, heads}, DType::kFloat32);
  if (compresses_queries_) {
    saved.q_a_tC = context.allocate({num_local, config.q_lora_rank});
    saved.q_rstd_t = context.allocate({num_local}, DType::kFloat32);
  } else {
    saved.q = context.allocate({num_tokens, heads * config.qk_head_dim()});
  }
  if (context.recompute == Recompute::kSelective) return;
  saved.kv_latent_KC =
      allocate_operand(context, {num_keys(context), config.kv_lora_rank}, input_forms(context, {wkv_b_}).wgrad);
  if (compresses_queries_) {
    saved.q_latent_TC =
        allocate_operand(context, {num_tokens, config.q_lora_rank}, input_forms(context, {wq_b_}).wgrad);
  }
  allocate_recomputed(context, saved);
}

GemmOperand Attention::key_latents(const LayerContext& context, const AttentionSaved& saved, bool for_wgrad) const {
  const InputForms forms = input_forms(context, {wkv_b_});
  return normed_latents(context, saved.kv_a_tC.columns(0, context.config->kv_lora_rank), kv_norm_, saved.kv_rstd_t,
                        for_wgrad ? forms.forward | forms.wgrad : forms.forward, saved.kv_latent_KC, num_keys(context),
                        keys_are_cut(context), [&](const Tensor& own, const Tensor& all) {
                          gather_keys(context, own, all, context.parameters->spec(wkv_b_).name);
                        });
}

GemmOperand Attention::query_latents(const LayerContext& context, const AttentionSaved& saved, bool for_wgrad) const {
  const InputForms forms = input_forms(context, {wq_b_});
  return normed_latents(context, saved.q_a_tC, q_norm_, saved.q_rstd_t,
                        for_wgrad ? forms.forward | forms.wgrad : forms.forward, saved.q_latent_TC,
                        context.num_tokens(), tokens_are_cut(context), [&](const Tensor& own, const Tensor& all) {
                          gather_tokens(context, own, all, context.parameters->spec(wq_b_).name);
                        });
}

void Attention::compute_recomputed(const LayerContext& context, AttentionSaved& saved, bool for_wgrad) const {
  const Tensor positions_T = context.batch->positions(context.op.device());
  const std::int64_t latent = context.config->kv_lora_rank;
  saved.kv_latent_KC = key_latents(context, saved, for_wgrad);
  linear_forward(context, saved.kv_latent_KC, wkv_b_, saved.kv);
  const Tensor k_rope_t = saved.kv_a_tC.columns(latent, saved.kv_a_tC.dim(1));
  if (keys_are_cut(context)) {
    const Tensor rotated_t = context.allocate({context.num_local_tokens(), context.config->qk_rope_head_dim});
    rotate(context, k_rope_t, context.local_rows(positions_T), 1, RopeDirection::kForward, rotated_t);
    gather_keys(context, rotated_t, saved.k_rope, context.parameters->spec(wkv_a_).name);
  } else {
    rotate(context, k_rope_t, positions_T, 1, RopeDirection::kForward, saved.k_rope);
  }
  if (compresses_queries_) {
    saved.q_latent_TC = query_latents(context, saved, for_wgrad);
    linear_forward(context, saved.q_latent_TC, wq_b_, saved.q);
    rotate(context, saved.q, positions_T, num_heads(context), RopeDirection::kForward, saved.q);
  }
}

void Attention::forward(const LayerContext& context, const GemmOperand& y_tD, const AttentionSaved& kept,
                        const Tensor& out_tD) const {
  TESSERA_DIMS(y_tD, out_tD, kept.kv_a_tC, kept.lse_TH);
  const TraceScope trace(context.op.trace, "attention.forward");
  const bool keeps = context.recompute != Recompute::kSelective;
  const ArenaScope scope(*context.op.arena);
  AttentionSaved saved = kept;
  if (!keeps) allocate_recomputed(context, saved);

  linear_forward(context, y_tD, wkv_a_, saved.kv_a_tC);
  if (compresses_queries_) {
    linear_forward(context, y_tD, wq_a_, saved.q_a_tC);
  } else {
    const ArenaScope query_scope(*context.op.arena);
    const GemmOperand y_TD =
        gather_tokens(context, y_tD, input_forms(context, {wq_}).forward, context.parameters->spec(wq_).name);
    linear_forward(context, y_TD, wq_, saved.q);
    rotate(context, saved.q, context.batch->positions(context.op.device()), num_heads(context), RopeDirection::kForward,
           saved.q);
  }
  compute_recomputed(context, saved, keeps);
  mla_attention_forward(context.op, dims(context), core_operands(context, saved), saved.o.plain, saved.lse_TH);
  const InputForms o_forms = input_forms(context, {wo_});
  const GemmOperand o = quantized_operand(context, saved.o.plain,
                                          out_tD.defined() ? o_forms.forward | o_forms.wgrad : o_forms.wgrad, saved.o);
  if (out_tD.defined()) row_parallel_forward(context, o, wo_, out_tD);
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
  rotate(context, kv_a.columns(latent, kv_a.dim(1)), positions_T, 1, RopeDirection::kForward, k_rope);
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
  rotate(context, q, positions_T, heads, RopeDirection::kForward, q);

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

void Attention::backward(const LayerContext& context, const GemmOperand& y_tD, const AttentionSaved& kept,
                         const Tensor& d_out_tD, const Tensor& d_y_tD) const {
  TESSERA_DIMS(y_tD, d_out_tD, d_y_tD, kept.kv_a_tC, kept.lse_TH);
  const TraceScope trace(context.op.trace, "attention.backward");
  const Context& op = context.op;
  const std::int64_t latent = context.config->kv_lora_rank;
  const Tensor positions_T = context.batch->positions(op.device());
  const ArenaScope scope(*op.arena);
  AttentionSaved saved = kept;
  if (context.recompute == Recompute::kSelective) {
    LayerContext repeat = context;
    repeat.repeated = true;
    allocate_recomputed(context, saved);
    compute_recomputed(repeat, saved, true);
  }

  // One site's gradients of weight and input.
  const auto backward = [&](const Tensor& d_out, const GemmOperand& x, ParamId site, const Tensor& d_x,
                            Write write = Write::kAssign) {
    const ArenaScope site_scope(*op.arena);
    const GemmOperand gradient = gradient_operand(context, d_out, site);
    linear_wgrad(context, gradient, x, site);
    linear_dgrad(context, gradient, site, d_x, write);
  };
  const Tensor d_q = context.allocate(saved.q.shape());
  const Tensor d_kv = context.allocate(saved.kv.shape());
  const Tensor d_kv_a_tC = context.allocate(saved.kv_a_tC.shape());
  const Tensor d_k_rope_t = d_kv_a_tC.columns(latent, d_kv_a_tC.dim(1));
  {
    const ArenaScope core_scope(*op.arena);
    const Tensor d_o = context.allocate(saved.o.plain.shape());
    const Tensor d_k_rope = context.allocate(saved.k_rope.shape());
    backward(gather_tokens(context, d_out_tD, context.parameters->spec(wo_).name), saved.o, wo_, d_o);
    mla_attention_backward(op, dims(context), core_operands(context, saved), saved.o.plain, saved.lse_TH, d_o, d_q,
                           d_kv, d_k_rope);
    rotate(context, d_q, positions_T, num_heads(context), RopeDirection::kBackward, d_q);
    const Tensor d_rotated_t = reduce_scatter_keys(context, d_k_rope, context.parameters->spec(wkv_a_).name);
    rotate(context, d_rotated_t, context.local_rows(positions_T), 1, RopeDirection::kBackward, d_k_rope_t);
  }

  {
    const ArenaScope latent_scope(*op.arena);
    const Tensor d_latent_KC = context.allocate({num_keys(context), latent});
    backward(d_kv, saved.kv_latent_KC, wkv_b_, d_latent_KC);
    const Tensor d_latent_tC = reduce_scatter_keys(context, d_latent_KC, context.parameters->spec(wkv_b_).name);
    rmsnorm_backward(op, d_latent_tC, saved.kv_a_tC.columns(0, latent), context.weight(kv_norm_), saved.kv_rstd_t,
                     d_kv_a_tC.columns(0, latent), Write::kAssign, context.gradient(kv_norm_));
  }
  backward(d_kv_a_tC, y_tD, wkv_a_, d_y_tD);
  if (!compresses_queries_) {
    const GemmOperand y_TD =
        gather_tokens(context, y_tD, input_forms(context, {wq_}).wgrad, context.parameters->spec(wq_).name);
    const GemmOperand gradient = gradient_operand(context, d_q, wq_);
    linear_wgrad(context, gradient, y_TD, wq_);
    column_parallel_dgrad(context, gradient, wq_, d_y_tD, Write::kAccumulate);
    return;
  }
  const Tensor d_latent_tC = context.allocate(saved.q_a_tC.shape());
  const Tensor d_q_a_tC = context.allocate(saved.q_a_tC.shape());
  {
    const ArenaScope site_scope(*op.arena);
    const GemmOperand gradient = gradient_operand(context, d_q, wq_b_);
    linear_wgrad(context, gradient, saved.q_latent_TC, wq_b_);
    column_parallel_dgrad(context, gradient, wq_b_, d_latent_tC);
  }
  rmsnorm_backward(op, d_latent_tC, saved.q_a_tC, context.weight(q_norm_), saved.q_rstd_t, d_q_a_tC, Write::kAssign,
                   context.gradient(q_norm_));
  backward(d_q_a_tC, y_tD, wq_a_, d_y_tD, Write::kAccumulate);
}

}  // namespace tessera
