// The mixture-of-experts layer: router, routed experts, shared experts. It is dropless: every token reaches all its
// experts. Expert parallelism shards the routed experts over ranks, and a dispatcher (ep/dispatcher.h) moves their
// rows.
#pragma once

#include <functional>
#include <optional>

#include "ep/domain_exchange.h"
#include "model/feed_forward.h"
#include "ops/routing/router.h"
#include "params/step_sums.h"

namespace tessera {

/// Holds what the experts keep of a round's rows.
struct ExpertRows {
  DispatchSaved dispatch;
  Tensor h_R2F;      // before SwiGLU; the backward may overwrite it
  GemmOperand x_RD;  // undefined if the backward dispatches the rows again
};

struct MoeSaved {
  RouterOutputs routing;
  ExpertRows rows;  // of the first round; later rounds keep nothing
  /// The tokens that came in the exchange between domains (ep/domain_exchange.h). They are kept if the backward needs
  /// them for later rounds alone, and are undefined otherwise.
  GemmOperand crossed;
  Tensor shared_h_T2I;
};

/// Returns the options of a dispatcher for this model's MoE layers.
DispatchOptions dispatch_options(const ModelConfig& config, DType compute, std::int64_t max_tokens);

class Moe {
 public:
  /// Adds the parameters and the expert bias under `prefix`.
  Moe(Parameters& parameters, const ModelConfig& config, const std::string& prefix, std::int64_t layer);

  /// Returns the forms in which the layer reads y_tD.
  InputForms y_forms(const LayerContext& context) const;
  /// Returns the multiple at which groups of rows must begin in these precisions.
  std::int64_t row_alignment(const QuantizedWeights& quantized) const;
  /// Allocates what the forward keeps.
  void allocate_saved(const LayerContext& context, std::int64_t num_tokens, MoeSaved& saved) const;
  /// Assigns the two parts of MoE(y_tD), after allocate_saved: the routed experts' sum and, if the layer has any, the
  /// shared experts' output. Both may be written at the same time, while y_tD is read. Adds to `sums`. A forward that
  /// is repeated for recomputation gets no sums. If routed_tD is undefined, computes only what the backward needs.
  void forward(const LayerContext& context, const GemmOperand& y_tD, const MoeSaved& saved, const Tensor& routed_tD,
               const Tensor& shared_tD, const MoeSums& sums) const;

  /// Assigns x_TD + MoE(y_TD) for the next tokens of texts, where all experts are on this rank. Keeps nothing.
  void decode(const LayerContext& context, const Tensor& x_TD, const Tensor& y_TD, const Tensor& out_TD) const;

  /// Computes d_y_tD from d_out_tD, and adds to the parameters' gradients. Overwrites the saved h.
  void backward(const LayerContext& context, const GemmOperand& y_tD, const MoeSaved& saved, const Tensor& d_out_tD,
                const Tensor& d_y_tD) const;

  const std::string& name() const { return name_; }
  bool has_shared_experts() const { return shared_.has_value(); }
  ParamId expert_bias() const { return expert_bias_; }

 private:
  /// Work that overlaps a dispatcher's call, such as a part of the shared experts. It runs in the context that it is
  /// given. An empty function means no work.
  using Beside = std::function<void(const LayerContext&)>;
  /// Holds what the dispatcher sends and returns in a backward. Its tokens are this rank's or, over several domains,
  /// those that came.
  struct Gradients {
    GemmOperand y, d_out;
    Tensor d_y, d_weights;
  };

  /// Allocates what a router computes for so many tokens.
  RouterOutputs allocate_routing(const LayerContext& context, std::int64_t num_tokens) const;
  /// Chooses the experts of y_tD. Adds to `sums`.
  void route(const LayerContext& context, const Tensor& y_tD, const RouterOutputs& routing, const MoeSums& sums) const;
  /// Returns what the experts keep of the round that was allocated. x_RD stays undefined.
  ExpertRows allocate_rows(const LayerContext& context, const DispatchSaved& dispatch) const;
  /// Calls body(context, rows) for each round after the first, while `rows` has memory.
  template <typename Body>
  void for_later_rounds(const LayerContext& context, const DispatchSaved& first, Body&& body) const;
  /// Runs transfer(op), and overlaps it with `beside`. The transfer is within a Turns::Call, for passes that run in
  /// turns. If `call` is null, that call ends with the transfer. Otherwise it stays open in *call until the caller
  /// resets it, and later rounds are within it. If *call is already open, the transfer joins it.
  template <typename Transfer>
  void run_beside(const LayerContext& context, const Beside& beside, Transfer&& transfer,
                  std::optional<Turns::Call>* call = nullptr) const;
  /// The work that overlaps the first round's two transfers, and the Turns::Calls that the transfers are within.
  struct FirstRound {
    Beside beside_first_call = {}, beside_last_call = {};
    // Arguments `call` of run_beside. If tokens have crossed between domains before, *first_call is open, and the first
    // transfer joins it. It is reset after that transfer.
    std::optional<Turns::Call>*first_call = nullptr, *last_call = nullptr;
  };
  /// Dispatches a round's tokens, and runs their experts. Assigns or adds the combined outputs to `out`, if that is
  /// defined.
  void experts_forward(const LayerContext& context, const GemmOperand& y, const ExpertRows& rows, const Tensor& out,
                       Write write, const FirstRound& first) const;
  /// Adds to the experts' gradients from a round's rows. Assigns or adds to d_y, and assigns to d_weights what
  /// dispatch_backward does.
  void experts_backward(const LayerContext& context, const Gradients& tokens, const ExpertRows& rows, Write write,
                        const FirstRound& first) const;
  /// Allocates the tokens of a backward that came from other domains, and sends this rank's y_tD and d_out_tD. `call`
  /// is as in run_beside.
  Gradients cross_backward(const LayerContext& context, const Tensor& y_tD, const Tensor& d_out_tD,
                           const MoeSaved& saved, const Beside& beside, std::optional<Turns::Call>* call) const;
  /// Tells the record, while the result lives, which dims are the experts' rows.
  StepRecord::Rows recorded_rows(const LayerContext& context, const DispatchSaved& dispatch) const;
  RouterOptions router_options(const LayerContext& context) const;
  /// Returns the number of SMs that a dispatcher's call takes while the shared experts run beside it. 0 means that they
  /// do not run beside it.
  int num_sms_of_dispatch(const LayerContext& context) const;
  /// Adds to loss_1 (float64) the balance loss of the micro-batch's sequences, including other ranks' tokens of them.
  /// If loss_1 is undefined, computes only what the backward needs.
  void balance(const LayerContext& context, const RouterOptions& options, const RouterOutputs& routing,
               const Tensor& loss_1) const;

  std::string name_;
  ParamId gate_;
  GroupedSite w13_, w2_;
  ParamId expert_bias_;
  std::optional<FeedForward> shared_;
};

}  // namespace tessera
