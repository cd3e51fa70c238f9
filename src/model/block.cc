#include "model/block.h"

#include "ops/elementwise/elementwise.h"
#include "tensor/dims.h"

namespace tessera {

Block::Block(Parameters& parameters, const ModelConfig& config, bool is_moe, const std::string& prefix,
             std::int64_t layer)
    : attention_norm_(parameters, prefix + "attention_norm.weight", config.dim),
      attention_(parameters, config, prefix + "attention.", layer),
      ffn_norm_(parameters, prefix + "ffn_norm.weight", config.dim) {
  if (is_moe) {
    moe_.emplace(parameters, config, prefix + "moe.", layer);
  } else {
    feed_forward_.emplace(parameters, config.dim, config.inter_dim, prefix + "feed_forward.", layer);
  }
}

void Block::forward(const LayerContext& context, const Tensor& x_tD, BlockSaved& saved, const Tensor& out_tD,
                    const MoeSums& sums) const {
  TESSERA_DIMS(x_tD, out_tD);
  const TraceScope trace(context.op.trace, "block.forward");
  if (context.recompute != Recompute::kFull) {
    forward_saving(context, x_tD, saved, out_tD, sums);
    return;
  }
  const ArenaScope scope(*context.op.arena);
  BlockSaved dropped;
  forward_saving(context.for_dropped(), x_tD, dropped, out_tD, sums);
  saved.x_tD = x_tD;
}

void Block::backward(const LayerContext& context, BlockSaved& saved, const Tensor& d_tD) const {
  const TraceScope trace(context.op.trace, "block.backward");
  if (context.recompute != Recompute::kFull) {
    backward_from_saved(context, saved, d_tD);
    return;
  }
  const ArenaScope scope(*context.op.arena);
  BlockSaved again;
  forward_saving(context.for_recomputation(), saved.x_tD, again, {}, {});
  backward_from_saved(context, again, d_tD);
}

InputForms Block::ffn_forms(const LayerContext& context) const {
  return feed_forward_ ? feed_forward_->x_forms(context) : moe_->y_forms(context);
}

void Block::forward_saving(const LayerContext& context, const Tensor& x_tD, BlockSaved& saved, const Tensor& out_tD,
                           const MoeSums& sums) const {
  const Context& op = context.op;
  const Shape shape = x_tD.shape();
  const std::int64_t num_tokens = x_tD.dim(0);
  const bool saves_norms = context.recompute != Recompute::kSelective;
  const InputForms attention_forms = attention_.y_forms(context), ffn_forms = this->ffn_forms(context);
  saved = {};
  saved.x_tD = x_tD;
  {
    const LayerContext for_saved = context.for_saved();
    saved.mid_tD = for_saved.allocate(shape);
    saved.attention_rstd_t = for_saved.allocate({num_tokens}, DType::kFloat32);
    saved.ffn_rstd_t = for_saved.allocate({num_tokens}, DType::kFloat32);
    attention_.allocate_saved(for_saved, saved.attention);
    if (feed_forward_) saved.ffn_h_T2I = feed_forward_->allocate_saved(for_saved);
    if (moe_) moe_->allocate_saved(for_saved, num_tokens, saved.moe);
    if (saves_norms) {
      saved.attention_y_tD = allocate_operand(for_saved, shape, attention_forms.wgrad);
      saved.ffn_y_tD = allocate_operand(for_saved, shape, ffn_forms.wgrad);
    }
  }
  // A norm writes what the forward reads and what is saved.
  const auto norm_output = [&](const InputForms& forms, const GemmOperand& saved_y) {
    return allocate_operand(context, shape, saves_norms ? forms.forward | forms.wgrad : forms.forward, saved_y);
  };
  const ArenaScope block_scope(*op.arena);
  const Tensor branch_tD = context.allocate(shape);
  {
    const ArenaScope scope(*op.arena);
    const GemmOperand y_tD = norm_output(attention_forms, saved.attention_y_tD);
    attention_norm_.forward(context, x_tD, y_tD, saved.attention_rstd_t);
    attention_.forward(context, y_tD, saved.attention, branch_tD);
  }
  const ArenaScope scope(*op.arena);
  const GemmOperand y_tD = norm_output(ffn_forms, saved.ffn_y_tD);
  ffn_norm_.residual_forward(context, x_tD, branch_tD, saved.mid_tD, y_tD, saved.ffn_rstd_t);
  // The network's output takes the place of the attention's. That of the shared experts is in out_tD until the sum.
  const Tensor ffn_tD = out_tD.defined() ? branch_tD : Tensor();
  const Tensor shared_tD = moe_ && moe_->has_shared_experts() ? out_tD : Tensor();
  if (feed_forward_) {
    feed_forward_->forward(context, y_tD, saved.ffn_h_T2I, ffn_tD);
  } else {
    moe_->forward(context, y_tD, saved.moe, ffn_tD, shared_tD, sums);
  }
  if (out_tD.defined()) add(op, saved.mid_tD, ffn_tD, out_tD, shared_tD);
}

void Block::decode(const LayerContext& context, const Tensor& x_TD, const Tensor& slot_T, const Tensor& cache_SPN,
                   const Tensor& out_TD) const {
  const TraceScope trace(context.op.trace, "block.decode");
  const Context& op = context.op;
  const ArenaScope scope(*op.arena);
  const Tensor rstd_T = context.allocate({x_TD.dim(0)}, DType::kFloat32);
  const Tensor mid_TD = context.allocate(x_TD.shape());
  const Tensor norm_TD = context.allocate(x_TD.shape()), branch_TD = context.allocate(x_TD.shape());
  attention_norm_.forward(context, x_TD, norm_TD, rstd_T);
  attention_.decode(context, norm_TD, slot_T, cache_SPN, branch_TD);
  ffn_norm_.residual_forward(context, x_TD, branch_TD, mid_TD, norm_TD, rstd_T);
  if (feed_forward_) {
    feed_forward_->forward(context, norm_TD, feed_forward_->allocate_saved(context), branch_TD);
    add(op, mid_TD, branch_TD, out_TD);
  } else {
    moe_->decode(context, mid_TD, norm_TD, out_TD);
  }
}

void Block::backward_from_saved(const LayerContext& context, const BlockSaved& saved, const Tensor& d_tD) const {
  TESSERA_DIMS(d_tD, saved.x_tD, saved.mid_tD, saved.ffn_rstd_t);
  const Context& op = context.op;
  const ArenaScope scope(*op.arena);
  const Tensor d_y_tD = context.allocate(d_tD.shape());
  // A norm's output, in the forms that weight gradients read.
  const auto norm_output = [&](const LayerContext& readers, const OperandForms& forms, const GemmOperand& saved_y,
                               const Tensor& x_tD, const RmsNorm& norm, const Tensor& rstd_t) {
    if (context.recompute != Recompute::kSelective) return saved_y;
    const GemmOperand y_tD = allocate_operand(readers, x_tD.shape(), forms);
    norm.forward(context, x_tD, y_tD, rstd_t);
    return y_tD;
  };
  {
    const ArenaScope half_scope(*op.arena);
    const GemmOperand y_tD = norm_output(for_deferred(context), ffn_forms(context).wgrad, saved.ffn_y_tD, saved.mid_tD,
                                         ffn_norm_, saved.ffn_rstd_t);
    if (feed_forward_) {
      feed_forward_->backward(context, y_tD, saved.ffn_h_T2I, d_tD, d_y_tD);
    } else {
      moe_->backward(context, y_tD, saved.moe, d_tD, d_y_tD);
    }
  }
  ffn_norm_.backward(context, d_y_tD, saved.mid_tD, saved.ffn_rstd_t, d_tD, Write::kAccumulate);
  {
    const ArenaScope half_scope(*op.arena);
    // No weight gradient that reads this output is deferred (Attention::backward).
    const GemmOperand y_tD = norm_output(context, attention_.y_forms(context).wgrad, saved.attention_y_tD, saved.x_tD,
                                         attention_norm_, saved.attention_rstd_t);
    attention_.backward(context, y_tD, saved.attention, d_tD, d_y_tD);
  }
  attention_norm_.backward(context, d_y_tD, saved.x_tD, saved.attention_rstd_t, d_tD, Write::kAccumulate);
}

}  // namespace tessera
