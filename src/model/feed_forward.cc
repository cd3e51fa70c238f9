#include "model/feed_forward.h"

#include "model/token_exchange.h"
#include "ops/elementwise/swiglu.h"
#include "tensor/dims.h"

namespace tessera {

FeedForward::FeedForward(Parameters& parameters, std::int64_t dim, std::int64_t inter_dim, const std::string& prefix,
                         std::int64_t layer)
    : w13_(parameters.add({.name = prefix + "w13.weight",
                           .shape = {2 * inter_dim, dim},
                           .init = init_shallow(),
                           .init_up = init_by_depth(layer),
                           .gemm = GemmKind::kLinear,
                           .cut = {.axis = Cut::Axis::kTensor, .dim = 0, .blocks = 2}})),
      w2_(parameters.add({.name = prefix + "w2.weight",
                          .shape = {dim, inter_dim},
                          .init = init_by_depth(layer),
                          .gemm = GemmKind::kLinear,
                          .cut = {.axis = Cut::Axis::kTensor, .dim = 1}})),
      inter_dim_(parameters.local_shape(w2_)[1]) {}

InputForms FeedForward::x_forms(const LayerContext& context) const { return gathered_forms(context, {w13_}); }

Tensor FeedForward::allocate_saved(const LayerContext& context) const {
  return context.allocate({context.num_tokens(), 2 * inter_dim_});
}

void FeedForward::forward(const LayerContext& context, const GemmOperand& x_tD, const Tensor& h_T2I,
                          const Tensor& out_tD, Write write) const {
  TESSERA_DIMS(x_tD, h_T2I, out_tD);
  const TraceScope trace(context.op.trace, "feed_forward.forward");
  const ArenaScope scope(*context.op.arena);
  {
    const ArenaScope x_scope(*context.op.arena);
    const GemmOperand x_TD =
        gather_tokens(context, x_tD, input_forms(context, {w13_}).forward, context.parameters->spec(w13_).name);
    linear_forward(context, x_TD, w13_, h_T2I);
  }
  if (!out_tD.defined()) return;
  const GemmOperand a_TI = allocate_operand(context, {h_T2I.dim(0), inter_dim_}, input_forms(context, {w2_}).forward);
  swiglu_forward(context.op, h_T2I, a_TI);
  row_parallel_forward(context, a_TI, w2_, out_tD, write);
}

void FeedForward::backward(const LayerContext& context, const GemmOperand& x_tD, const Tensor& h_T2I,
                           const Tensor& d_out_tD, const Tensor& d_x_tD) const {
  const ArenaScope scope(*context.op.arena);
  backward_weights(context, x_tD, backward_inputs(context, h_T2I, d_out_tD, d_x_tD));
}

FeedForward::Gradients FeedForward::backward_inputs(const LayerContext& context, const Tensor& h_T2I,
                                                    const Tensor& d_out_tD, const Tensor& d_x_tD) const {
  TESSERA_DIMS(h_T2I, d_out_tD, d_x_tD);
  const TraceScope trace(context.op.trace, "feed_forward.backward_inputs");
  const GemmOperand d_out =
      gradient_operand(context, gather_tokens(context, d_out_tD, context.parameters->spec(w2_).name), w2_);
  const Tensor d_a_TI = context.allocate({h_T2I.dim(0), inter_dim_});
  linear_dgrad(context, d_out, w2_, d_a_TI);
  // In place, where they are wanted as they are.
  const GemmOperand d_h_T2I = allocate_operand(context, h_T2I.shape(), gradient_forms(context, w13_), h_T2I);
  const GemmOperand a_TI = allocate_operand(context, d_a_TI.shape(), input_forms(context, {w2_}).wgrad, d_a_TI);
  swiglu_backward(context.op, d_a_TI, h_T2I, d_h_T2I, a_TI);
  column_parallel_dgrad(context, d_h_T2I, w13_, d_x_tD);
  return {.d_out_TD = d_out, .a_TI = a_TI, .d_h_T2I = d_h_T2I};
}

void FeedForward::backward_weights(const LayerContext& context, const GemmOperand& x_tD,
                                   const Gradients& gradients) const {
  TESSERA_DIMS(x_tD, gradients.d_out_TD, gradients.a_TI, gradients.d_h_T2I);
  const TraceScope trace(context.op.trace, "feed_forward.backward_weights");
  linear_wgrad(context, gradients.d_out_TD, gradients.a_TI, w2_);
  const GemmOperand x_TD =
      gather_tokens(context, x_tD, input_forms(context, {w13_}).wgrad, context.parameters->spec(w13_).name);
  linear_wgrad(context, gradients.d_h_T2I, x_TD, w13_);
}

}  // namespace tessera
