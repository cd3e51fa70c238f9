// The mixture-of-experts layer: router, routed experts, shared experts. Dropless: every token reaches all its experts.
// The routed experts are cut over the ranks of expert parallelism; a dispatcher (ep/dispatcher.h) brings their rows.
#pragma once

#include <optional>

#include "ep/dispatcher.h"
#include "model/feed_forward.h"
#include "ops/routing/router.h"
#include "params/step_sums.h"

namespace tessera {

struct MoeSaved {
  // Kept under Recompute::kNone and kSelective.
  RouterOutputs routing;
  DispatchSaved dispatch;
  Tensor h_R2F;  // before SwiGLU; the backward may overwrite it
  Tensor shared_h_T2I;
  // Kept under kNone, else dispatched again.
  GemmOperand x_RD;
};

/// What a dispatcher of this model's MoE layers must be told of the model.
DispatchOptions dispatch_options(const ModelConfig& config, DType compute, std::int64_t max_tokens);

class Moe {
 public:
  /// Adds the parameters and the expert bias under `prefix`.
  Moe(Parameters& parameters, const ModelConfig& config, const std::string& prefix, std::int64_t layer);

  /// Forms of y_tD.
  InputForms y_forms(const LayerContext& context) const;
  /// What groups of rows must begin at a multiple of, in these precisions.
  std::int64_t row_alignment(const QuantizedWeights& quantized) const;
  /// Memory for what the forward keeps.
  void allocate_saved(const LayerContext& context, std::int64_t num_tokens, MoeSaved& saved) const;
  /// After allocate_saved: out_tD = MoE(y_tD); sums += (a forward that is repeated for recomputation is given none). An
  /// undefined out_tD: only what the backward needs.
  void forward(const LayerContext& context, const GemmOperand& y_tD, const MoeSaved& saved, const Tensor& out_tD,
               const MoeSums& sums) const;

  /// d_y_tD from d_out_tD; parameters' gradients +=. Overwrites the saved h.
  void backward(const LayerContext& context, const GemmOperand& y_tD, const MoeSaved& saved, const Tensor& d_out_tD,
                const Tensor& d_y_tD) const;

  const std::string& name() const { return name_; }
  ParamId expert_bias() const { return expert_bias_; }

 private:
  RouterOptions router_options(const LayerContext& context) const;
  /// SMs that a dispatcher's call takes while the shared experts run beside it; 0: they do not.
  int num_sms_of_dispatch(const LayerContext& context) const;
  /// loss_1 (float64) += the balance loss of the micro-batch's sequences, with the tokens that other ranks have of
  /// them; undefined: only what the backward needs.
  void balance(const LayerContext& context, const RouterOptions& options, const RouterOutputs& routing,
               const Tensor& loss_1) const;

  std::string name_;
  ParamId gate_, w13_, w2_, expert_bias_;
  std::optional<FeedForward> shared_;
};

}  // namespace tessera
