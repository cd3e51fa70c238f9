// A transformer block, on this rank's tokens [t, D]: x ← x + MLA(RMSNorm(x)), then x ← x + FFN_or_MoE(RMSNorm(x)).
#pragma once

#include "model/attention.h"
#include "model/moe.h"

namespace tessera {

struct BlockSaved {
  Tensor x_tD;  // the input, always kept (it is the output of the block before)
  // These are kept under Recompute::kNone and Recompute::kSelective.
  Tensor mid_tD;  // after the attention's residual connection
  Tensor attention_rstd_t, ffn_rstd_t;
  AttentionSaved attention;
  Tensor ffn_h_T2I;  // dense only
  MoeSaved moe;      // MoE only
  // These are the norms' outputs. They are kept under Recompute::kNone. Otherwise they are recomputed.
  GemmOperand attention_y_tD, ffn_y_tD;
};

class Block {
 public:
  Block(Parameters& parameters, const ModelConfig& config, bool is_moe, const std::string& prefix, std::int64_t layer);

  /// Computes out_tD from x_tD, which must not change until the backward. An MoE layer adds to `sums`.
  void forward(const LayerContext& context, const Tensor& x_tD, BlockSaved& saved, const Tensor& out_tD,
               const MoeSums& sums) const;

  /// Turns d_tD from the output's gradient into the input's, and adds to the parameters' gradients.
  void backward(const LayerContext& context, BlockSaved& saved, const Tensor& d_tD) const;

  /// Computes out_TD for one new token of each slot, with Attention::decode as the attention.
  void decode(const LayerContext& context, const Tensor& x_TD, const Tensor& slot_T, const Tensor& cache_SPN,
              const Tensor& out_TD) const;

  /// Returns the MoE layer. It is null for a dense block.
  const Moe* moe() const { return moe_ ? &*moe_ : nullptr; }

 private:
  /// Returns the forms in which the second half reads its input.
  InputForms ffn_forms(const LayerContext& context) const;
  void forward_saving(const LayerContext& context, const Tensor& x_tD, BlockSaved& saved, const Tensor& out_tD,
                      const MoeSums& sums) const;
  void backward_from_saved(const LayerContext& context, const BlockSaved& saved, const Tensor& d_tD) const;

  RmsNorm attention_norm_;
  Attention attention_;
  RmsNorm ffn_norm_;
  std::optional<FeedForward> feed_forward_;
  std::optional<Moe> moe_;
};

}  // namespace tessera
