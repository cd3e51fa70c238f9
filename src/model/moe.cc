#include "model/moe.h"

#include "ops/elementwise/elementwise.h"
#include "ops/elementwise/swiglu.h"
#include "ops/routing/moe_decode.h"
#include "tensor/dims.h"

namespace tessera {

namespace {
/// Describes the experts' matrices, which expert parallelism shards by expert.
ParamSpec experts_spec(const std::string& name, const Shape& shape, const Init& init,
                       const std::optional<Init>& init_up = std::nullopt) {
  return {name, shape, init, init_up, GemmKind::kGrouped, {.axis = Cut::Axis::kExperts, .dim = 0}};
}
}  // namespace

Moe::Moe(Parameters& parameters, const ModelConfig& config, const std::string& prefix, std::int64_t layer)
    : name_(prefix.substr(0, prefix.size() - 1)),
      gate_(parameters.add({prefix + "router.gate.weight", {config.num_experts, config.dim}, init_by_depth(layer)})),
      w13_(parameters, experts_spec(prefix + "experts.w13", {config.num_experts, 2 * config.moe_inter_dim, config.dim},
                                    init_shallow(), init_by_depth(layer))),
      w2_(parameters, experts_spec(prefix + "experts.w2", {config.num_experts, config.dim, config.moe_inter_dim},
                                   init_by_depth(layer))),
      expert_bias_(parameters.add_buffer(prefix + "expert_bias", {config.num_experts})) {
  if (config.num_shared_experts > 0) {
    shared_.emplace(parameters, config.dim, config.num_shared_experts * config.moe_inter_dim,
                    prefix + "shared_experts.", layer);
  }
}

DispatchOptions dispatch_options(const ModelConfig& config, DType compute, std::int64_t max_tokens) {
  return {.max_tokens = max_tokens,
          .dim = config.dim,
          .num_experts = config.num_experts,
          .top_k = config.top_k,
          .dtype = compute};
}

RouterOptions Moe::router_options(const LayerContext& context) const {
  const ModelConfig& config = context.config();
  return {.score_function = config.score_func,
          .route_norm = config.route_norm,
          .route_scale = config.route_scale,
          .top_k = config.top_k,
          .num_groups = config.n_expert_groups,
          .num_limited_groups = config.n_limited_groups,
          .force_load_balance = context.model->force_load_balance || context.model->warms_up,
          .balance_coefficient = config.seq_balance_loss_coeff,
          .seq_len = context.batch->seq_len(),
          .first_token = context.first_local_token(),
          .tokens_per_seq = context.batch->tokens_per_seq()};
}

int Moe::num_sms_of_dispatch(const LayerContext& context) const {
  // With tensor parallelism the shared experts communicate, too. A probe must see operators one after another.
  const bool can_run_beside = shared_ && !are_sharded(context, TokenSet::kMicroBatch) && context.probe == nullptr;
  return can_run_beside ? context.model->dispatcher->num_sms() : 0;
}

StepRecord::Rows Moe::recorded_rows(const LayerContext& context, const DispatchSaved& dispatch) const {
  return {context.op.record, name_, dispatch.num_rows(),
          context.model->dispatcher->expected_rows(dispatch.num_tokens(), dispatch.layer.alignment)};
}

InputForms Moe::y_forms(const LayerContext& context) const {
  const InputForms forms{.forward = {.plain = true}, .wgrad = {.plain = true}};  // for the router and the routed rows
  return shared_ ? forms | shared_->x_forms(context) : forms;
}

std::int64_t Moe::row_alignment(const QuantizedWeights& quantized) const {
  return std::max(w13_.row_alignment(quantized), w2_.row_alignment(quantized));
}

RouterOutputs Moe::allocate_routing(const LayerContext& context, std::int64_t num_tokens) const {
  const std::int64_t experts = context.config().num_experts;
  const Shape slots{num_tokens, context.config().top_k};
  return {.scores_TE = context.allocate({num_tokens, experts}, DType::kFloat32),
          .expert_ids_TK = context.allocate(slots, DType::kInt32),
          .weights_TK = context.allocate(slots, DType::kFloat32),
          .counts_E = context.allocate({experts}, DType::kInt32),
          .balance_f_BE = {}};
}

void Moe::allocate_saved(const LayerContext& context, std::int64_t num_tokens, MoeSaved& saved) const {
  const ModelConfig& config = context.config();
  saved = {};
  saved.routing = allocate_routing(context, num_tokens);
  if (config.seq_balance_loss_coeff != 0.0f) {
    saved.routing.balance_f_BE = context.allocate({context.batch->num_seqs(), config.num_experts}, DType::kFloat32);
  }
  const RouterOutputs& routing = saved.routing;
  saved.rows = allocate_rows(
      context,
      context.model->dispatcher->allocate_saved(
          context.op, {.name = name_, .alignment = row_alignment(*context.model->quantized)},
          {.expert_ids_tK = routing.expert_ids_TK, .weights_tK = routing.weights_TK, .counts_E = routing.counts_E}));
  if (shared_) saved.shared_h_T2I = shared_->allocate_saved(context);
  if (context.recompute != Recompute::kSelective) {
    saved.rows.x_RD =
        allocate_operand(context, {saved.rows.dispatch.num_rows(), config.dim}, w13_.product_forms(context).wgrad);
    const Dispatcher& dispatcher = *context.model->dispatcher;
    if (dispatcher.exchange() != nullptr && dispatcher.has_rounds()) {
      saved.crossed = dispatcher.exchange()->allocate_tokens(context.op, saved.rows.dispatch,
                                                             dispatcher.options().dispatch_forward);
    }
  }
}

ExpertRows Moe::allocate_rows(const LayerContext& context, const DispatchSaved& dispatch) const {
  return {.dispatch = dispatch,
          .h_R2F = context.allocate({dispatch.num_rows(), 2 * context.config().moe_inter_dim}),
          .x_RD = {}};
}

template <typename Body>
void Moe::for_later_rounds(const LayerContext& context, const DispatchSaved& first, Body&& body) const {
  LayerContext of_round = at_once(context);  // the rows are not kept for a deferred product
  of_round.probe = nullptr;                  // the first round is the sample
  of_round.op.record = nullptr;              // a balanced load has one round
  context.model->dispatcher->for_later_rounds(of_round.op, first, context.model->loads_kernels ? 2 : 1,
                                              [&](const Context& call, const DispatchSaved& dispatch) {
                                                const LayerContext on_call = of_round.with_op(call);
                                                body(on_call, allocate_rows(on_call, dispatch));
                                              });
}

void Moe::balance(const LayerContext& context, const RouterOptions& options, const RouterOutputs& routing,
                  const Tensor& loss_1) const {
  const ArenaScope scope(*context.op.arena);
  const Tensor sums_B2E = context.allocate({context.batch->num_seqs(), 2, routing.scores_TE.dim(1)}, DType::kFloat32);
  balance_sums(context.op, options, routing.scores_TE, sums_B2E);
  context.mesh().sequence.all_reduce(sums_B2E, name_).wait();
  balance_loss(context.op, options, sums_B2E, routing.balance_f_BE, loss_1);
}

template <typename Transfer>
void Moe::run_beside(const LayerContext& context, const Beside& beside, Transfer&& transfer,
                     std::optional<Turns::Call>* call) const {
  const Dispatcher& dispatcher = *context.model->dispatcher;
  const int num_sms = beside ? num_sms_of_dispatch(context) : 0;
  if (beside && num_sms == 0) beside(context);
  CallStream stream = dispatcher.call_stream(context.op, num_sms);
  if (num_sms > 0) beside(context.with_op(stream.beside()));
  const ArenaScope scope(*context.op.arena);  // ends after the join: until then the arena takes nothing back
  std::optional<Turns::Call> own_call;
  std::optional<Turns::Call>& turn = call != nullptr ? *call : own_call;
  const bool goes_on = turn.has_value();
  if (!goes_on) turn.emplace(dispatcher.turns());
  // What ran on the main stream just now may have used the memory that the transfer gets.
  transfer(stream.begin(goes_on && (!beside || num_sms > 0)));
  stream.join();
}

void Moe::experts_forward(const LayerContext& context, const GemmOperand& y, const ExpertRows& rows, const Tensor& out,
                          Write write, const FirstRound& first) const {
  TESSERA_DIMS(rows.h_R2F);
  const ModelConfig& config = context.config();
  const Context& op = context.op;
  Dispatcher& dispatcher = *context.model->dispatcher;
  const Tensor& offsets_e1 = rows.dispatch.offsets_e1;
  const Shape rows_shape{rows.dispatch.num_rows(), config.dim};
  const ArenaScope scope(*op.arena);
  const InputForms x_forms = w13_.product_forms(context);
  const bool keeps = rows.x_RD.defined();
  const GemmOperand x_RD =
      allocate_operand(context, rows_shape, keeps ? x_forms.forward | x_forms.wgrad : x_forms.forward,
                       keeps ? rows.x_RD : dispatcher.rows_in_window(op, rows.dispatch));
  {
    const ArenaScope side_scope(*op.arena);  // of what runs beside it
    run_beside(
        context, first.beside_first_call,
        [&](const Context& call) { dispatcher.dispatch(call, y, rows.dispatch, x_RD); }, first.first_call);
    if (first.first_call != nullptr) first.first_call->reset();
  }
  w13_.forward(context, x_RD, offsets_e1, rows.h_R2F);
  if (!out.defined()) return;
  const GemmOperand a_RF =
      allocate_operand(context, {rows_shape[0], config.moe_inter_dim}, w2_.product_forms(context).forward);
  // Rows that the backward does not read are overwritten, also in the window.
  const Tensor expert_out_RD = !keeps && x_RD.plain.defined() ? x_RD.plain : context.allocate(rows_shape);
  swiglu_forward(op, rows.h_R2F, a_RF, rows.dispatch.num_rows_1());
  w2_.forward(context, a_RF, offsets_e1, expert_out_RD);
  run_beside(
      context, first.beside_last_call,
      [&](const Context& call) { dispatcher.combine(call, expert_out_RD, rows.dispatch, out, write); },
      first.last_call);
}

void Moe::experts_backward(const LayerContext& context, const Gradients& tokens, const ExpertRows& rows, Write write,
                           const FirstRound& first) const {
  TESSERA_DIMS(rows.h_R2F);
  const Context& op = context.op;
  Dispatcher& dispatcher = *context.model->dispatcher;
  const Tensor &offsets_e1 = rows.dispatch.offsets_e1, &weights_R = rows.dispatch.weights_R;
  const Shape rows_shape{rows.dispatch.num_rows(), context.config().dim};
  const ArenaScope scope(*op.arena);
  // Gradient of the experts' outputs without the routing weight; that factor comes in with SwiGLU's backward.
  const GemmOperand d_out_RD = allocate_operand(context, rows_shape, w2_.gradient_forms(context),
                                                dispatcher.gradients_in_window(op, rows.dispatch));
  run_beside(
      context, first.beside_first_call,
      [&](const Context& call) { dispatcher.combine_backward(call, tokens.d_out, rows.dispatch, d_out_RD); },
      first.first_call);
  if (first.first_call != nullptr) first.first_call->reset();
  const Tensor d_a_RF = context.allocate({rows_shape[0], context.config().moe_inter_dim});
  w2_.dgrad(context, d_out_RD, offsets_e1, d_a_RF);
  // In plain form, d_h overwrites h, and the activations overwrite d_a.
  const GemmOperand d_h_R2F = allocate_operand(context, rows.h_R2F.shape(), w13_.gradient_forms(context), rows.h_R2F);
  const GemmOperand weighted_a_RF = allocate_operand(context, d_a_RF.shape(), w2_.product_forms(context).wgrad, d_a_RF);
  const Tensor d_weights_R = context.allocate(weights_R.shape(), DType::kFloat32);
  swiglu_backward_weighted(op, d_a_RF, rows.h_R2F, weights_R, rows.dispatch.num_rows_1(), d_h_R2F, weighted_a_RF,
                           d_weights_R);
  w2_.wgrad(at_once(context), d_out_RD, weighted_a_RF, offsets_e1);
  if (rows.x_RD.defined()) {
    w13_.wgrad(context, d_h_R2F, rows.x_RD, offsets_e1);
  } else if (context.deferred != nullptr) {
    context.deferred->add_dispatched(context, w13_, d_h_R2F, tokens.y, rows.dispatch);
  } else {
    const GemmOperand x_RD = allocate_operand(context, rows_shape, w13_.product_forms(context).wgrad,
                                              dispatcher.rows_in_window(op, rows.dispatch));
    dispatcher.dispatch_again(op, tokens.y, rows.dispatch, x_RD);
    w13_.wgrad(context, d_h_R2F, x_RD, offsets_e1);
  }
  const Tensor d_x_RD = d_out_RD.plain.defined() ? d_out_RD.plain : context.allocate(rows_shape);
  w13_.dgrad(context, d_h_R2F, offsets_e1, d_x_RD);
  run_beside(
      context, first.beside_last_call,
      [&](const Context& call) {
        dispatcher.dispatch_backward(call, d_x_RD, d_weights_R, rows.dispatch, tokens.d_y, write, tokens.d_weights);
      },
      first.last_call);
}

void Moe::route(const LayerContext& context, const Tensor& y_tD, const RouterOutputs& routing,
                const MoeSums& sums) const {
  const Context& op = context.op;
  const ArenaScope scope(*op.arena);
  const Tensor logits_tE = context.allocate({y_tD.dim(0), context.config().num_experts}, DType::kFloat32);
  linear_forward(op, y_tD, context.weight(gate_), logits_tE);
  const RouterOptions options = router_options(context);
  router_forward(op, options, logits_tE, context.parameters().buffer(expert_bias_), routing);
  if (routing.balance_f_BE.defined()) balance(context, options, routing, sums.balance_loss_1);
  if (sums.counts_E.defined()) add_counts(op, routing.counts_E, sums.counts_E);
}

void Moe::decode(const LayerContext& context, const Tensor& x_TD, const Tensor& y_TD, const Tensor& out_TD) const {
  TESSERA_DIMS(x_TD, y_TD, out_TD);
  const TraceScope trace(context.op.trace, "moe.decode");
  const ArenaScope scope(*context.op.arena);
  const RouterOutputs routing = allocate_routing(context, y_TD.dim(0));
  route(context, y_TD, routing, {});
  moe_decode(context.op, x_TD, y_TD,
             {.w13_E2FD = context.weight(w13_.id()),
              .w2_EDF = context.weight(w2_.id()),
              .shared_w13_2ID = shared_ ? context.weight(shared_->w13()) : Tensor(),
              .shared_w2_DI = shared_ ? context.weight(shared_->w2()) : Tensor(),
              .expert_ids_TK = routing.expert_ids_TK,
              .weights_TK = routing.weights_TK,
              .counts_E = routing.counts_E},
             out_TD);
}

void Moe::forward(const LayerContext& context, const GemmOperand& y, const MoeSaved& saved, const Tensor& routed_tD,
                  const Tensor& shared_tD, const MoeSums& sums) const {
  TESSERA_DIMS(routed_tD, shared_tD, saved.shared_h_T2I);
  const TraceScope trace(context.op.trace, "moe.forward");
  const Context& op = context.op;
  const Tensor& y_tD = y.plain;
  const ArenaScope scope(*op.arena);
  const DispatchSaved& dispatch = saved.rows.dispatch;
  const StepRecord::Rows rows = recorded_rows(context, dispatch);
  route(context, y_tD, saved.routing, sums);
  const bool has_outputs = routed_tD.defined();
  Beside shared_inputs, shared_outputs;
  if (shared_) {
    shared_inputs = [&](const LayerContext& side) { shared_->forward_inputs(side, y, saved.shared_h_T2I); };
    if (has_outputs) {
      shared_outputs = [&](const LayerContext& side) { shared_->forward_outputs(side, saved.shared_h_T2I, shared_tD); };
    }
  }
  const Dispatcher& dispatcher = *context.model->dispatcher;
  DomainExchange* exchange = dispatcher.exchange();
  GemmOperand tokens = y_tD;
  Tensor routed = routed_tD;
  std::optional<Turns::Call> first_call, last_call;
  if (exchange == nullptr) {
    experts_forward(context, tokens, saved.rows, routed, Write::kAssign,
                    {.beside_first_call = shared_inputs, .beside_last_call = shared_outputs, .last_call = &last_call});
  } else {
    tokens = saved.crossed.defined() ? saved.crossed
                                     : exchange->allocate_tokens(op, dispatch, dispatcher.options().dispatch_forward);
    if (has_outputs) routed = context.allocate({dispatch.num_tokens(), y_tD.dim(1)});
    {
      const ArenaScope side_scope(*op.arena);  // of what runs beside it
      run_beside(
          context, shared_inputs, [&](const Context& call) { exchange->dispatch(call, y_tD, dispatch, tokens); },
          &first_call);
    }
    experts_forward(context, tokens, saved.rows, routed, Write::kAssign,
                    {.first_call = &first_call, .last_call = &last_call});
  }
  if (!has_outputs) return;
  for_later_rounds(context, dispatch, [&](const LayerContext& of_round, const ExpertRows& round_rows) {
    experts_forward(of_round, tokens, round_rows, routed, Write::kAccumulate, {});
  });
  if (exchange != nullptr) {
    run_beside(
        context, shared_outputs,
        [&](const Context& call) { exchange->combine(call, routed, dispatch, routed_tD, Write::kAssign); }, &last_call);
  }
  last_call.reset();
  if (sums.later_rounds_1.defined()) dispatcher.add_later_rounds(op, dispatch, sums.later_rounds_1);
}

Moe::Gradients Moe::cross_backward(const LayerContext& context, const Tensor& y_tD, const Tensor& d_out_tD,
                                   const MoeSaved& saved, const Beside& beside,
                                   std::optional<Turns::Call>* call) const {
  const Context& op = context.op;
  const DispatchSaved& dispatch = saved.rows.dispatch;
  const DispatchOptions& options = context.model->dispatcher->options();
  DomainExchange& exchange = *context.model->dispatcher->exchange();
  const bool keeps_rows = saved.rows.x_RD.defined();
  const Gradients tokens{
      // A deferred weight gradient dispatches these tokens once more.
      .y = keeps_rows ? saved.crossed
                      : exchange.allocate_tokens(for_deferred(context).op, dispatch, options.dispatch_forward),
      .d_out = exchange.allocate_tokens(op, dispatch, options.combine_backward),
      .d_y = context.allocate({dispatch.num_tokens(), options.dim}),
      .d_weights = context.allocate({dispatch.num_tokens(), options.top_k}, DType::kFloat32)};
  const auto cross = [&](const Context& on_call) {
    exchange.combine_backward(on_call, d_out_tD, dispatch, tokens.d_out);
    if (!keeps_rows) exchange.dispatch_again(on_call, y_tD, dispatch, tokens.y);
  };
  run_beside(context, beside, cross, call);
  return tokens;
}

void Moe::backward(const LayerContext& context, const GemmOperand& y, const MoeSaved& saved, const Tensor& d_out_tD,
                   const Tensor& d_y_tD) const {
  TESSERA_DIMS(d_out_tD, d_y_tD, saved.shared_h_T2I);
  const TraceScope trace(context.op.trace, "moe.backward");
  const ModelConfig& config = context.config();
  const Context& op = context.op;
  const Tensor& y_tD = y.plain;
  const std::int64_t num_tokens = y_tD.dim(0);
  const ArenaScope scope(*op.arena);
  const DispatchSaved& dispatch = saved.rows.dispatch;
  const StepRecord::Rows rows = recorded_rows(context, dispatch);
  const Tensor d_weights_tK = context.allocate({num_tokens, config.top_k}, DType::kFloat32);
  {
    const ArenaScope experts_scope(*op.arena);
    FeedForward::Gradients shared;
    Beside shared_inputs, shared_weights;
    if (shared_) {
      shared_inputs = [&](const LayerContext& side) {
        shared = shared_->backward_inputs(side, saved.shared_h_T2I, d_out_tD, d_y_tD);
      };
      shared_weights = [&](const LayerContext& side) { shared_->backward_weights(side, y, shared); };
    }
    const Write write = shared_ ? Write::kAccumulate : Write::kAssign;
    DomainExchange* exchange = context.model->dispatcher->exchange();
    Gradients tokens{.y = y_tD, .d_out = d_out_tD, .d_y = d_y_tD, .d_weights = d_weights_tK};
    std::optional<Turns::Call> first_call, last_call;
    if (exchange == nullptr) {
      experts_backward(
          context, tokens, saved.rows, write,
          {.beside_first_call = shared_inputs, .beside_last_call = shared_weights, .last_call = &last_call});
    } else {
      tokens = cross_backward(context, y_tD, d_out_tD, saved, shared_inputs, &first_call);
      experts_backward(context, tokens, saved.rows, Write::kAssign,
                       {.first_call = &first_call, .last_call = &last_call});
    }
    // The first round's product may be deferred. Then a later round, which a graph repeats any number of times, adds.
    if (context.deferred != nullptr && context.model->dispatcher->has_rounds()) w13_.clear_unassigned(context);
    for_later_rounds(context, dispatch, [&](const LayerContext& of_round, ExpertRows round_rows) {
      // Rows stay in the window until they have been read: no other dispatch comes in between.
      round_rows.x_RD =
          allocate_operand(of_round, {round_rows.dispatch.num_rows(), config.dim}, w13_.product_forms(of_round).wgrad,
                           of_round.model->dispatcher->rows_in_window(of_round.op, round_rows.dispatch));
      experts_forward(of_round, tokens.y, round_rows, {}, Write::kAssign, {});
      Gradients of_tokens = tokens;
      of_tokens.d_weights = of_round.allocate(tokens.d_weights.shape(), DType::kFloat32);
      experts_backward(of_round, of_tokens, round_rows, Write::kAccumulate, {});
      add(of_round.op, tokens.d_weights, of_tokens.d_weights, tokens.d_weights);
    });
    if (exchange != nullptr) {
      run_beside(
          context, shared_weights,
          [&](const Context& call) {
            exchange->dispatch_backward(call, tokens.d_y, tokens.d_weights, dispatch, d_y_tD, write, d_weights_tK);
          },
          &last_call);
    }
    last_call.reset();
  }

  const Tensor d_logits_tE = context.allocate({num_tokens, config.num_experts}, DType::kFloat32);
  router_backward(op, router_options(context), saved.routing, d_weights_tK, context.balance_scale, d_logits_tE);
  linear_wgrad(op, d_logits_tE, y_tD, context.gradient(gate_));
  linear_dgrad(op, d_logits_tE, context.weight(gate_), d_y_tD, Write::kAccumulate);
}

}  // namespace tessera
