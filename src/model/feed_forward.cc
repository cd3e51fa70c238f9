#include "model/feed_forward.h"

#include "ops/swiglu.h"

namespace tessera {

FeedForward::FeedForward(Parameters& parameters, std::int64_t dim, std::int64_t inter_dim, const std::string& prefix,
                         std::int64_t layer)
    : inter_dim_(inter_dim),
      w13_(parameters.add(
          {prefix + "w13.weight", {2 * inter_dim, dim}, init_shallow(), init_by_depth(layer), GemmKind::kLinear})),
      w2_(parameters.add({.name = prefix + "w2.weight",
                          .shape = {dim, inter_dim},
                          .init = init_by_depth(layer),
                          .gemm = GemmKind::kLinear})) {}

void FeedForward::forward(const LayerContext& context, const GemmOperand& x_TD, const Tensor& h_T2I,
                          const Tensor& out_TD, Write write) const {
  const TraceScope trace(context.op.trace, "feed_forward.forward");
  linear_forward(context, x_TD, w13_, h_T2I);
  if (!out_TD.defined()) return;
  const ArenaScope scope(*context.op.arena);
  const GemmOperand a_TI = allocate_operand(context, {h_T2I.dim(0), inter_dim_}, input_forms(context, {w2_}).forward);
  swiglu_forward(context.op, h_T2I, a_TI);
  linear_forward(context, a_TI, w2_, out_TD, write);
}

void FeedForward::backward(const LayerContext& context, const GemmOperand& x_TD, const Tensor& h_T2I,
                           const Tensor& d_out_TD, const Tensor& d_x_TD) const {
  const TraceScope trace(context.op.trace, "feed_forward.backward");
  const ArenaScope scope(*context.op.arena);
  const GemmOperand d_out = gradient_operand(context, d_out_TD, w2_);
  const Tensor d_a_TI = context.allocate({h_T2I.dim(0), inter_dim_});
  linear_dgrad(context, d_out, w2_, d_a_TI);
  // In place, where they are wanted as they are.
  const GemmOperand d_h_T2I = allocate_operand(context, h_T2I.shape(), gradient_forms(context, w13_), h_T2I);
  const GemmOperand a_TI = allocate_operand(context, d_a_TI.shape(), input_forms(context, {w2_}).wgrad, d_a_TI);
  swiglu_backward(context.op, d_a_TI, h_T2I, d_h_T2I, a_TI);
  linear_wgrad(context, d_out, a_TI, w2_);
  linear_wgrad(context, d_h_T2I, x_TD, w13_);
  linear_dgrad(context, d_h_T2I, w13_, d_x_TD);
}

}  // namespace tessera
