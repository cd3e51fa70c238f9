#include "model/feed_forward.h"

#include "ops/elementwise/swiglu.h"
#include "tensor/dims.h"

namespace tessera {

FeedForward::FeedForward(Parameters& parameters, std::int64_t dim, std::int64_t inter_dim, const std::string& prefix,
                         std::int64_t layer)
    : w13_(parameters,
           {.name = prefix + "w13.weight",
            .shape = {2 * inter_dim, dim},
            .init = init_shallow(),
            .init_up = init_by_depth(layer),
            .gemm = GemmKind::kLinear,
            .cut = {.axis = Cut::Axis::kTensor, .dim = 0, .blocks = 2}},
           Sharding::kColumn),
      w2_(parameters,
          {.name = prefix + "w2.weight",
           .shape = {dim, inter_dim},
           .init = init_by_depth(layer),
           .gemm = GemmKind::kLinear,
           .cut = {.axis = Cut::Axis::kTensor, .dim = 1}},
          Sharding::kRow),
      inter_dim_(parameters.local_shape(w2_.id())[1]) {}

InputForms FeedForward::x_forms(const LayerContext& context) const { return w13_.input_forms(context); }

Tensor FeedForward::allocate_saved(const LayerContext& context) const {
  return context.allocate({context.num_tokens(), 2 * inter_dim_});
}

void FeedForward::forward(const LayerContext& context, const GemmOperand& x_tD, const Tensor& h_T2I,
                          const Tensor& out_tD) const {
  forward_inputs(context, x_tD, h_T2I);
  if (out_tD.defined()) forward_outputs(context, h_T2I, out_tD);
}

void FeedForward::forward_inputs(const LayerContext& context, const GemmOperand& x_tD, const Tensor& h_T2I) const {
  TESSERA_DIMS(x_tD, h_T2I);
  const TraceScope trace(context.op.trace, "feed_forward.forward_inputs");
  const ArenaScope scope(*context.op.arena);
  w13_.forward(context, w13_.gather_input(context, x_tD, LinearSite::Reader::kForward), h_T2I);
}

void FeedForward::forward_outputs(const LayerContext& context, const Tensor& h_T2I, const Tensor& out_tD) const {
  TESSERA_DIMS(h_T2I, out_tD);
  const TraceScope trace(context.op.trace, "feed_forward.forward_outputs");
  const ArenaScope scope(*context.op.arena);
  const GemmOperand a_TI = allocate_operand(context, {h_T2I.dim(0), inter_dim_}, w2_.input_forms(context).forward);
  swiglu_forward(context.op, h_T2I, a_TI);
  w2_.forward(context, a_TI, out_tD);
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
  const GemmOperand d_out_TD = w2_.gradient(context, d_out_tD);
  const Tensor d_a_TI = context.allocate({h_T2I.dim(0), inter_dim_});
  w2_.dgrad(context, d_out_TD, d_a_TI);
  // In plain form, d_h overwrites h, and the activations overwrite d_a.
  const GemmOperand d_h_T2I = allocate_operand(context, h_T2I.shape(), w13_.gradient_forms(context), h_T2I);
  const GemmOperand a_TI = allocate_operand(context, d_a_TI.shape(), w2_.input_forms(context).wgrad, d_a_TI);
  swiglu_backward(context.op, d_a_TI, h_T2I, d_h_T2I, a_TI);
  w13_.dgrad(context, d_h_T2I, d_x_tD);
  return {.d_out_TD = d_out_TD, .a_TI = a_TI, .d_h_T2I = d_h_T2I};
}

void FeedForward::backward_weights(const LayerContext& context, const GemmOperand& x_tD,
                                   const Gradients& gradients) const {
  TESSERA_DIMS(x_tD, gradients.d_out_TD, gradients.a_TI, gradients.d_h_T2I);
  const TraceScope trace(context.op.trace, "feed_forward.backward_weights");
  w2_.wgrad(at_once(context), gradients.d_out_TD, gradients.a_TI);
  w13_.wgrad(context, gradients.d_h_T2I, w13_.gather_input(context, x_tD, LinearSite::Reader::kWgrad));
}

}  // namespace tessera
