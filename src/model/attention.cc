#include "model/attention.h"

#include "ops/attention/mla_decode.h"
#include "tensor/dims.h"

namespace tessera {

namespace {

// Tensor parallelism shards the rows or columns of heads. Weights of the latents are whole on every rank.
ParamSpec linear_spec(const std::string& name, const Shape& shape, const Init& init) {
  return {.name = name, .shape = shape, .init = init, .gemm = GemmKind::kLinear};
}

LinearSite replicated(Parameters& parameters, const std::string& name, const Shape& shape) {
  return {parameters, linear_spec(name, shape, init_shallow()), Sharding::kReplicated};
}

LinearSite column_sharded(Parameters& parameters, const std::string& name, const Shape& shape,
                          TokenSet tokens = TokenSet::kMicroBatch) {
  ParamSpec spec = linear_spec(name, shape, init_shallow());
  spec.cut = {.axis = Cut::Axis::kTensor, .dim = 0};
  return {parameters, spec, Sharding::kColumn, tokens};
}

LinearSite row_sharded(Parameters& parameters, const std::string& name, const Shape& shape, const Init& init) {
  ParamSpec spec = linear_spec(name, shape, init);
  spec.cut = {.axis = Cut::Axis::kTensor, .dim = 1};
  return {parameters, spec, Sharding::kRow};
}

/// Returns the number of heads that this rank has.
std::int64_t num_heads(const LayerContext& context) { return context.config().n_heads / context.mesh().degrees.tp; }

std::int64_t num_keys(const LayerContext& context) { return num_tokens(context, TokenSet::kSequences); }

using Reader = LinearSite::Reader;

}  // namespace

Attention::Attention(Parameters& parameters, const ModelConfig& config, const std::string& prefix, std::int64_t layer)
    : compressed_(config.q_lora_rank == 0
                      ? std::nullopt
                      : std::optional(CompressedQueries{
                            .wq_a = replicated(parameters, prefix + "wq_a.weight", {config.q_lora_rank, config.dim}),
                            .norm = {parameters, prefix + "q_norm.weight", config.q_lora_rank},
                            .wq_b = column_sharded(parameters, prefix + "wq_b.weight",
                                                   {config.n_heads * config.qk_head_dim(), config.q_lora_rank})})),
      wq_(compressed_ ? std::nullopt
                      : std::optional(column_sharded(parameters, prefix + "wq.weight",
                                                     {config.n_heads * config.qk_head_dim(), config.dim}))),
      wkv_a_(
          replicated(parameters, prefix + "wkv_a.weight", {config.kv_lora_rank + config.qk_rope_head_dim, config.dim})),
      kv_norm_(parameters, prefix + "kv_norm.weight", config.kv_lora_rank),
      wkv_b_(column_sharded(parameters, prefix + "wkv_b.weight",
                            {config.n_heads * (config.qk_nope_head_dim + config.v_head_dim), config.kv_lora_rank},
                            TokenSet::kSequences)),
      wo_(row_sharded(parameters, prefix + "wo.weight", {config.dim, config.n_heads * config.v_head_dim},
                      init_by_depth(layer))),
      rope_(config, layer) {}

MlaDims Attention::dims(const LayerContext& context) const {
  const ModelConfig& config = context.config();
  return {.num_seqs = context.batch->num_seqs(),
          .seq_len = context.batch->seq_len(),
          .num_heads = num_heads(context),
          .dim_nope = config.qk_nope_head_dim,
          .dim_rope = config.qk_rope_head_dim,
          .dim_v = config.v_head_dim,
          .scale = rope_.softmax_scale(config, *context.model->rope),
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
  rope_.turn(context.op, *context.model->rope, x, num_heads, positions, direction, y);
}

InputForms Attention::y_forms(const LayerContext& context) const {
  return wkv_a_.input_forms(context) | (compressed_ ? compressed_->wq_a : *wq_).input_forms(context);
}

void Attention::allocate_core_inputs(const LayerContext& context, AttentionSaved& saved) const {
  const ModelConfig& config = context.config();
  const std::int64_t heads = num_heads(context);
  saved.kv = context.allocate({num_keys(context), heads * (config.qk_nope_head_dim + config.v_head_dim)});
  saved.k_rope = context.allocate({num_keys(context), config.qk_rope_head_dim});
  if (compressed_) saved.q = context.allocate({context.num_tokens(), heads * config.qk_head_dim()});
}

void Attention::allocate_saved(const LayerContext& context, AttentionSaved& saved) const {
  const ModelConfig& config = context.config();
  const std::int64_t num_tokens = context.num_tokens(), heads = num_heads(context);
  const std::int64_t num_local = context.num_local_tokens();
  saved = {};
  saved.kv_a_tC = context.allocate({num_local, config.kv_lora_rank + config.qk_rope_head_dim});
  saved.kv_rstd_t = context.allocate({num_local}, DType::kFloat32);
  OperandForms o_forms = wo_.input_forms(context).wgrad;
  o_forms.plain = true;  // for the attention core's backward
  saved.o = allocate_operand(context, {num_tokens, heads * config.v_head_dim}, o_forms);
  saved.lse_TH = context.allocate({num_tokens, heads}, DType::kFloat32);
  if (compressed_) {
    saved.q_a_tC = context.allocate({num_local, config.q_lora_rank});
    saved.q_rstd_t = context.allocate({num_local}, DType::kFloat32);
  } else {
    saved.q = context.allocate({num_tokens, heads * config.qk_head_dim()});
  }
  if (context.recompute == Recompute::kSelective) return;
  saved.kv_latent_KC =
      allocate_operand(context, {num_keys(context), config.kv_lora_rank}, wkv_b_.product_forms(context).wgrad);
  if (compressed_) {
    saved.q_latent_TC =
        allocate_operand(context, {num_tokens, config.q_lora_rank}, compressed_->wq_b.product_forms(context).wgrad);
  }
  allocate_core_inputs(context, saved);
}

void Attention::compute_core_inputs(const LayerContext& context, AttentionSaved& saved, Reader reader) const {
  const Tensor positions_T = context.batch->positions(context.op.device());
  const Tensor latent_tC = saved.kv_a_tC.columns(0, context.config().kv_lora_rank);
  const Tensor k_rope_t = saved.kv_a_tC.columns(latent_tC.dim(1), saved.kv_a_tC.dim(1));
  saved.kv_latent_KC =
      wkv_b_.gather_written(context, latent_tC.shape(), reader, saved.kv_latent_KC,
                            [&](const GemmOperand& y) { kv_norm_.forward(context, latent_tC, y, saved.kv_rstd_t); });
  wkv_b_.forward(context, saved.kv_latent_KC, saved.kv);
  if (are_sharded(context, TokenSet::kSequences)) {
    const Tensor rotated_t = context.allocate(k_rope_t.shape());
    rotate(context, k_rope_t, context.local_rows(positions_T), 1, RopeDirection::kForward, rotated_t);
    all_gather(context, TokenSet::kSequences, rotated_t, saved.k_rope, wkv_a_.name());
  } else {
    rotate(context, k_rope_t, positions_T, 1, RopeDirection::kForward, saved.k_rope);
  }
  if (!compressed_) return;
  saved.q_latent_TC = compressed_->wq_b.gather_written(
      context, saved.q_a_tC.shape(), reader, saved.q_latent_TC,
      [&](const GemmOperand& y) { compressed_->norm.forward(context, saved.q_a_tC, y, saved.q_rstd_t); });
  compressed_->wq_b.forward(context, saved.q_latent_TC, saved.q);
  rotate(context, saved.q, positions_T, num_heads(context), RopeDirection::kForward, saved.q);
}

void Attention::forward(const LayerContext& context, const GemmOperand& y_tD, const AttentionSaved& kept,
                        const Tensor& out_tD) const {
  TESSERA_DIMS(y_tD, out_tD, kept.kv_a_tC, kept.lse_TH);
  const TraceScope trace(context.op.trace, "attention.forward");
  const bool recomputes = context.recompute == Recompute::kSelective;
  const ArenaScope scope(*context.op.arena);
  AttentionSaved saved = kept;
  if (recomputes) allocate_core_inputs(context, saved);

  wkv_a_.forward(context, y_tD, saved.kv_a_tC);
  if (compressed_) {
    compressed_->wq_a.forward(context, y_tD, saved.q_a_tC);
  } else {
    const ArenaScope query_scope(*context.op.arena);
    wq_->forward(context, wq_->gather_input(context, y_tD, Reader::kForward), saved.q);
    rotate(context, saved.q, context.batch->positions(context.op.device()), num_heads(context), RopeDirection::kForward,
           saved.q);
  }
  compute_core_inputs(context, saved, recomputes ? Reader::kForward : Reader::kBoth);
  mla_attention_forward(context.op, dims(context), core_operands(context, saved), saved.o.plain, saved.lse_TH);
  const InputForms o_forms = wo_.input_forms(context);
  const GemmOperand o = quantized_operand(context, saved.o.plain,
                                          out_tD.defined() ? o_forms.forward | o_forms.wgrad : o_forms.wgrad, saved.o);
  if (out_tD.defined()) wo_.forward(context, o, out_tD);
}

void Attention::decode(const LayerContext& context, const Tensor& y_TD, const Tensor& slot_T, const Tensor& cache_SPN,
                       const Tensor& out_TD) const {
  const TraceScope trace(context.op.trace, "attention.decode");
  const ModelConfig& config = context.config();
  const Context& op = context.op;
  const std::int64_t num_tokens = y_TD.dim(0), heads = config.n_heads, latent = config.kv_lora_rank;
  const std::int64_t dim_v = config.v_head_dim, q_head = config.qk_head_dim();
  const Tensor positions_T = context.batch->positions(op.device());
  const ArenaScope scope(*op.arena);

  const Tensor kv_a = context.allocate({num_tokens, latent + config.qk_rope_head_dim});
  const Tensor q = context.allocate({num_tokens, heads * q_head});
  const Tensor wkv_b = context.weight(wkv_b_.id()), q_absorbed = context.allocate({num_tokens, heads * latent});
  if (compressed_) {
    const Tensor rstd_T = context.allocate({num_tokens}, DType::kFloat32);
    const Tensor q_a_TC = context.allocate({num_tokens, config.q_lora_rank});
    const Tensor q_latent_TC = context.allocate({num_tokens, config.q_lora_rank});
    linear_pair_forward(op, y_TD, {context.weight(compressed_->wq_a.id()), context.weight(wkv_a_.id())},
                        {q_a_TC, kv_a});
    compressed_->norm.forward(context, q_a_TC, q_latent_TC, rstd_T);
    compressed_->wq_b.forward(context, q_latent_TC, q);
  } else {
    linear_pair_forward(op, y_TD, {context.weight(wq_->id()), context.weight(wkv_a_.id())}, {q, kv_a});
  }
  rope_.prepare_decode(op, *context.model->rope,
                       {.kv_a = kv_a,
                        .norm_weight_C = context.weight(kv_norm_.weight()),
                        .norm_eps = config.norm_eps,
                        .q = q,
                        .wkv_b = wkv_b,
                        .q_latent = q_absorbed,
                        .num_heads = heads},
                       slot_T, positions_T, cache_SPN);
  const Tensor o = context.allocate({num_tokens, heads * dim_v});
  mla_decode(op,
             {.num_heads = heads,
              .dim_nope = config.qk_nope_head_dim,
              .dim_rope = config.qk_rope_head_dim,
              .dim_latent = latent,
              .dim_v = dim_v,
              .scale = rope_.softmax_scale(config, *context.model->rope)},
             {.q = q,
              .q_latent = q_absorbed,
              .wkv_b = wkv_b,
              .cache_SPN = cache_SPN,
              .slot_T = slot_T,
              .position_T = positions_T},
             o);
  wo_.forward(context, o, out_TD);
}

void Attention::backward(const LayerContext& context, const GemmOperand& y_tD, const AttentionSaved& kept,
                         const Tensor& d_out_tD, const Tensor& d_y_tD) const {
  TESSERA_DIMS(y_tD, d_out_tD, d_y_tD, kept.kv_a_tC, kept.lse_TH);
  const TraceScope trace(context.op.trace, "attention.backward");
  const Context& op = context.op;
  const std::int64_t latent = context.config().kv_lora_rank;
  const Tensor positions_T = context.batch->positions(op.device());
  const ArenaScope scope(*op.arena);
  AttentionSaved saved = kept;
  if (context.recompute == Recompute::kSelective) {
    allocate_core_inputs(context, saved);
    compute_core_inputs(context.for_recomputation(), saved, Reader::kBoth);
  }
  // These gradients have much memory for their products' FLOPs. So no weight gradient but wo's is deferred.
  const LayerContext now = at_once(context);
  const Tensor d_q = context.allocate(saved.q.shape()), d_kv = context.allocate(saved.kv.shape());
  const Tensor d_kv_a_tC = context.allocate(saved.kv_a_tC.shape());
  const Tensor d_latent_part_tC = d_kv_a_tC.columns(0, latent);
  const Tensor d_k_rope_t = d_kv_a_tC.columns(latent, d_kv_a_tC.dim(1));
  {
    const ArenaScope core_scope(*op.arena);
    const Tensor d_o = context.allocate(saved.o.plain.shape());
    const Tensor d_k_rope = context.allocate(saved.k_rope.shape());
    wo_.backward(context, d_out_tD, saved.o, d_o);
    mla_attention_backward(op, dims(context), core_operands(context, saved), saved.o.plain, saved.lse_TH, d_o, d_q,
                           d_kv, d_k_rope);
    rotate(context, d_q, positions_T, num_heads(context), RopeDirection::kBackward, d_q);
    const Tensor d_rotated_t = reduce_scatter(context, TokenSet::kSequences, d_k_rope, wkv_a_.name());
    rotate(context, d_rotated_t, context.local_rows(positions_T), 1, RopeDirection::kBackward, d_k_rope_t);
  }
  {
    const ArenaScope latent_scope(*op.arena);
    const Tensor d_latent_tC = context.allocate(d_latent_part_tC.shape());
    wkv_b_.backward(now, d_kv, saved.kv_latent_KC, d_latent_tC);
    kv_norm_.backward(context, d_latent_tC, saved.kv_a_tC.columns(0, latent), saved.kv_rstd_t, d_latent_part_tC);
  }
  wkv_a_.backward(now, d_kv_a_tC, y_tD, d_y_tD);
  if (!compressed_) {
    wq_->backward(now, d_q, wq_->gather_input(context, y_tD, Reader::kWgrad), d_y_tD, Write::kAccumulate);
    return;
  }
  const Tensor d_latent_tC = context.allocate(saved.q_a_tC.shape());
  const Tensor d_q_a_tC = context.allocate(saved.q_a_tC.shape());
  compressed_->wq_b.backward(now, d_q, saved.q_latent_TC, d_latent_tC);
  compressed_->norm.backward(context, d_latent_tC, saved.q_a_tC, saved.q_rstd_t, d_q_a_tC);
  compressed_->wq_a.backward(now, d_q_a_tC, y_tD, d_y_tD, Write::kAccumulate);
}

}  // namespace tessera
