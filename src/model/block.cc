#include "model/block.h"

#include "ops/elementwise/elementwise.h"
#include "ops/norm/rmsnorm.h"

namespace tessera {

Block::Block(Parameters& parameters, const ModelConfig& config, bool is_moe, const std::string& prefix,
             std::int64_t layer)
    : attention_norm_(parameters.add({prefix + "attention_norm.weight", {config.dim}, {}})),
      attention_(parameters, config, prefix + "attention.", layer),
      ffn_norm_(parameters.add({prefix + "ffn_norm.weight", {config.dim}, {}})) {
  if (is_moe) {
    moe_.emplace(parameters, config, prefix + "moe.", layer);
  } else {
    feed_forward_.emplace(parameters, config.dim, config.inter_dim, prefix + "feed_forward.", layer);
  }
}

void Block::forward(const LayerContext& context, const Tensor& x_TD, BlockSaved& saved, const Tensor& out_TD,
                    const MoeSums& sums) const {
  const TraceScope trace(context.op.trace, "block.forward");
  if (context.recompute != Recompute::kFull) {
    forward_keeping(context, x_TD, saved, out_TD, sums);
    return;
  }
  const ArenaScope scope(*context.op.arena);
  LayerContext transient = context;
  transient.recompute = Recompute::kSelective;  // writes least of what only a backward would read
  transient.kept = nullptr;
  BlockSaved dropped;
  forward_keeping(transient, x_TD, dropped, out_TD, sums);
  saved.x_TD = x_TD;
}

void Block::backward(const LayerContext& context, BlockSaved& saved, const Tensor& d_TD) const {
  const TraceScope trace(context.op.trace, "block.backward");
  if (context.recompute != Recompute::kFull) {
    backward_from_saved(context, saved, d_TD);
    return;
  }
  const ArenaScope scope(*context.op.arena);
  LayerContext repeat = context;
  repeat.repeated = true;
  repeat.kept = nullptr;
  BlockSaved again;
  forward_keeping(repeat, saved.x_TD, again, {}, {});
  backward_from_saved(context, again, d_TD);
}

InputForms Block::ffn_forms(const LayerContext& context) const {
  return feed_forward_ ? feed_forward_->x_forms(context) : moe_->y_forms(context);
}

void Block::forward_keeping(const LayerContext& context, const Tensor& x_TD, BlockSaved& saved, const Tensor& out_TD,
                            const MoeSums& sums) const {
  const Context& op = context.op;
  const Shape shape = x_TD.shape();
  const std::int64_t num_tokens = x_TD.dim(0);
  const float eps = context.config->norm_eps;
  const bool keep_norms = context.recompute != Recompute::kSelective;
  const InputForms attention_forms = attention_.y_forms(context), ffn_forms = this->ffn_forms(context);
  saved = {};
  saved.x_TD = x_TD;
  {
    const LayerContext keeping = context.keeping();
    saved.mid_TD = keeping.allocate(shape);
    saved.attention_rstd_T = keeping.allocate({num_tokens}, DType::kFloat32);
    saved.ffn_rstd_T = keeping.allocate({num_tokens}, DType::kFloat32);
    attention_.allocate_saved(keeping, saved.attention);
    if (feed_forward_) saved.ffn_h_T2I = feed_forward_->allocate_saved(keeping);
    if (moe_) moe_->allocate_saved(keeping, num_tokens, saved.moe);
    if (keep_norms) {
      saved.attention_y_TD = allocate_operand(keeping, shape, attention_forms.wgrad);
      saved.ffn_y_TD = allocate_operand(keeping, shape, ffn_forms.wgrad);
    }
  }
  // What a norm writes: what is kept of it, and what the forward reads.
  const auto norm_output = [&](const InputForms& forms, const GemmOperand& kept) {
    return allocate_operand(context, shape, keep_norms ? forms.forward | forms.wgrad : forms.forward, kept);
  };
  const ArenaScope block_scope(*op.arena);
  const Tensor branch_TD = context.allocate(shape);
  {
    const ArenaScope scope(*op.arena);
    const GemmOperand y_TD = norm_output(attention_forms, saved.attention_y_TD);
    rmsnorm_forward(op, x_TD, context.weight(attention_norm_), eps, y_TD, saved.attention_rstd_T);
    attention_.forward(context, y_TD, saved.attention, branch_TD);
  }
  const ArenaScope scope(*op.arena);
  const GemmOperand y_TD = norm_output(ffn_forms, saved.ffn_y_TD);
  residual_rmsnorm_forward(op, x_TD, branch_TD, context.weight(ffn_norm_), eps, saved.mid_TD, y_TD, saved.ffn_rstd_T);
  feed(context, y_TD, saved, branch_TD, out_TD, sums);
}

void Block::feed(const LayerContext& context, const GemmOperand& y_TD, BlockSaved& saved, const Tensor& scratch_TD,
                 const Tensor& out_TD, const MoeSums& sums) const {
  const Tensor branch_TD = out_TD.defined() ? scratch_TD : Tensor();
  if (feed_forward_) {
    feed_forward_->forward(context, y_TD, saved.ffn_h_T2I, branch_TD, Write::kAssign);
  } else {
    moe_->forward(context, y_TD, saved.moe, branch_TD, sums);
  }
  if (out_TD.defined()) add(context.op, saved.mid_TD, branch_TD, out_TD);
}

void Block::decode(const LayerContext& context, const Tensor& x_TD, const Tensor& slot_T, const Tensor& cache_SPN,
                   const Tensor& out_TD) const {
  const TraceScope trace(context.op.trace, "block.decode");
  const Context& op = context.op;
  const ArenaScope scope(*op.arena);
  const std::int64_t num_tokens = x_TD.dim(0);
  const float eps = context.config->norm_eps;
  const Tensor rstd_T = context.allocate({num_tokens}, DType::kFloat32);
  BlockSaved dropped;
  dropped.mid_TD = context.allocate(x_TD.shape());
  if (feed_forward_) dropped.ffn_h_T2I = feed_forward_->allocate_saved(context);
  if (moe_) moe_->allocate_saved(context, num_tokens, dropped.moe);
  const Tensor norm_TD = context.allocate(x_TD.shape()), branch_TD = context.allocate(x_TD.shape());
  rmsnorm_forward(op, x_TD, context.weight(attention_norm_), eps, norm_TD, rstd_T);
  attention_.decode(context, norm_TD, slot_T, cache_SPN, branch_TD);
  residual_rmsnorm_forward(op, x_TD, branch_TD, context.weight(ffn_norm_), eps, dropped.mid_TD, norm_TD, rstd_T);
  feed(context, norm_TD, dropped, branch_TD, out_TD, {});
}

void Block::backward_from_saved(const LayerContext& context, const BlockSaved& saved, const Tensor& d_TD) const {
  const Context& op = context.op;
  const float eps = context.config->norm_eps;
  const ArenaScope scope(*op.arena);
  const Tensor d_y_TD = context.allocate(d_TD.shape());
  // A norm's output, in the forms that weight gradients read.
  const auto norm_output = [&](const OperandForms& forms, const GemmOperand& kept, const Tensor& x_TD, ParamId weight,
                               const Tensor& rstd_T) {
    if (context.recompute != Recompute::kSelective) return kept;
    const GemmOperand y_TD = allocate_operand(context, x_TD.shape(), forms);
    rmsnorm_forward(op, x_TD, context.weight(weight), eps, y_TD, rstd_T);
    return y_TD;
  };
  {
    const ArenaScope half_scope(*op.arena);
    const GemmOperand y_TD =
        norm_output(ffn_forms(context).wgrad, saved.ffn_y_TD, saved.mid_TD, ffn_norm_, saved.ffn_rstd_T);
    if (feed_forward_) {
      feed_forward_->backward(context, y_TD, saved.ffn_h_T2I, d_TD, d_y_TD);
    } else {
      moe_->backward(context, y_TD, saved.moe, d_TD, d_y_TD);
    }
  }
  rmsnorm_backward(op, d_y_TD, saved.mid_TD, context.weight(ffn_norm_), saved.ffn_rstd_T, d_TD, Write::kAccumulate,
                   context.gradient(ffn_norm_));
  {
    const ArenaScope half_scope(*op.arena);
    const GemmOperand y_TD = norm_output(attention_.y_forms(context).wgrad, saved.attention_y_TD, saved.x_TD,
                                         attention_norm_, saved.attention_rstd_T);
    attention_.backward(context, y_TD, saved.attention, d_TD, d_y_TD);
  }
  rmsnorm_backward(op, d_y_TD, saved.x_TD, context.weight(attention_norm_), saved.attention_rstd_T, d_TD,
                   Write::kAccumulate, context.gradient(attention_norm_));
}

}  // namespace tessera
