#include "model/feed_forward.h"

#include "ops/gemm.h"
#include "ops/swiglu.h"

namespace tessera {

FeedForward::FeedForward(Parameters& parameters, std::int64_t dim, std::int64_t inter_dim, const std::string& prefix,
                         std::int64_t layer)
    : inter_dim_(inter_dim),
      w13_(parameters.add({prefix + "w13.weight", {2 * inter_dim, dim}, init_shallow(), init_by_depth(layer)})),
      w2_(parameters.add({prefix + "w2.weight", {dim, inter_dim}, init_by_depth(layer)})) {}

void FeedForward::forward(const LayerContext& context, const Tensor& x_TD, const Tensor& h_T2I, const Tensor& out_TD,
                          Write write) const {
  const TraceScope trace(context.op.trace, "feed_forward.forward");
  linear_forward(context.op, x_TD, context.weight(w13_), h_T2I);
  if (!out_TD.defined()) return;
  const ArenaScope scope(*context.op.arena);
  const Tensor a_TI = context.allocate({x_TD.dim(0), inter_dim_});
  swiglu_forward(context.op, h_T2I, a_TI);
  linear_forward(context.op, a_TI, context.weight(w2_), out_TD, write);
}

void FeedForward::backward(const LayerContext& context, const Tensor& x_TD, const Tensor& h_T2I, const Tensor& d_out_TD,
                           const Tensor& d_x_TD) const {
  const TraceScope trace(context.op.trace, "feed_forward.backward");
  const ArenaScope scope(*context.op.arena);
  const Tensor d_a_TI = context.allocate({x_TD.dim(0), inter_dim_});
  linear_dgrad(context.op, d_out_TD, context.weight(w2_), d_a_TI);
  swiglu_backward(context.op, d_a_TI, h_T2I, h_T2I, d_a_TI);  // in place
  const Tensor &d_h_T2I = h_T2I, &a_TI = d_a_TI;
  linear_wgrad(context.op, d_out_TD, a_TI, context.gradient(w2_));
  linear_wgrad(context.op, d_h_T2I, x_TD, context.gradient(w13_));
  linear_dgrad(context.op, d_h_T2I, context.weight(w13_), d_x_TD);
}

}  // namespace tessera
