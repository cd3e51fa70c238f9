// The dense feed-forward network W2 · (silu(W1 x) ⊙ W3 x), which also serves as the shared experts of an MoE layer.
// Each tensor-parallel rank has I / tp of the hidden width (model/token_exchange.h).
#pragma once

#include "model/gemm_site.h"

namespace tessera {

class FeedForward {
 public:
  /// Adds `prefix`w13.weight [2I, D] (gate rows, then up rows) and `prefix`w2.weight [D, I].
  FeedForward(Parameters& parameters, std::int64_t dim, std::int64_t inter_dim, const std::string& prefix,
              std::int64_t layer);

  /// Returns the forms in which the network reads x_tD.
  InputForms x_forms(const LayerContext& context) const;
  /// Allocates h_T2I for all T tokens. The backward needs it.
  Tensor allocate_saved(const LayerContext& context) const;

  /// Computes h_T2I = x · W13ᵀ, and assigns the network's output to out_tD, if that is defined. x_tD, out_tD and their
  /// gradients are [t, D].
  void forward(const LayerContext& context, const GemmOperand& x_tD, const Tensor& h_T2I, const Tensor& out_tD) const;
  // These two make the forward in two calls. The first one assigns h_T2I. The second one reads it, and assigns out_tD.
  void forward_inputs(const LayerContext& context, const GemmOperand& x_tD, const Tensor& h_T2I) const;
  void forward_outputs(const LayerContext& context, const Tensor& h_T2I, const Tensor& out_tD) const;

  /// Assigns d_x_tD, computed from d_out_tD, and adds to the parameters' gradients. Overwrites h_T2I.
  void backward(const LayerContext& context, const GemmOperand& x_tD, const Tensor& h_T2I, const Tensor& d_out_tD,
                const Tensor& d_x_tD) const;

  // The next two functions make the backward in two calls. The first one computes d_x_tD. The second one computes the
  // parameters' gradients from what the first one leaves in the arena.
  struct Gradients {
    GemmOperand d_out_TD, a_TI, d_h_T2I;
  };
  Gradients backward_inputs(const LayerContext& context, const Tensor& h_T2I, const Tensor& d_out_tD,
                            const Tensor& d_x_tD) const;
  void backward_weights(const LayerContext& context, const GemmOperand& x_tD, const Gradients& gradients) const;

  ParamId w13() const { return w13_.id(); }
  ParamId w2() const { return w2_.id(); }

 private:
  LinearSite w13_, w2_;
  std::int64_t inter_dim_;  // I of this rank
};

}  // namespace tessera
