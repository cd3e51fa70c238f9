// The end of the model: final norm, vocabulary projection and cross-entropy, with their gradients. They are computed
// chunk by chunk over the tokens, so the logits of only one chunk are in memory. Tensor-parallel ranks have V / tp
// entries of the vocabulary each. For the logits, a rank tells the others three sums per token
// (ops/loss/cross_entropy.h).
//
// Logits are float32. If the projection is in low precision, they have the type that layers compute in, because its
// products are less exact than that type.
#pragma once

#include "model/gemm_site.h"
#include "model/norm.h"

namespace tessera {

class Head {
 public:
  /// Adds the weight `norm_name` [D]. `output` is the vocabulary projection [V, D], which MTP modules share. It must
  /// outlive this.
  Head(Parameters& parameters, const ModelConfig& config, const std::string& norm_name, const LinearSite& output);

  /// Adds to loss_1 (float64) the cross-entropies of this rank's tokens with valid labels. x_tD [t, D] has this rank's
  /// tokens, and labels_T has the labels of all T. If d_x_tD is defined, assigns to it `scale` times the gradient of
  /// all ranks' sums, and adds to the parameters' gradients. If logits_TV (float32) is defined, assigns the logits to
  /// it. Tests use that on a rank that has the whole vocabulary.
  void forward_backward(const LayerContext& context, const Tensor& x_tD, const Tensor& labels_T, float scale,
                        const Tensor& loss_1, const Tensor& d_x_tD, const Tensor& logits_TV = {}) const;

  /// Computes logits_TV (float32) for all rows of x_TD.
  void logits(const LayerContext& context, const Tensor& x_TD, const Tensor& logits_TV) const;

 private:
  RmsNorm norm_;
  const LinearSite* output_;
};

}  // namespace tessera
