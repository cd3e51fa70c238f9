// A transformer block: x ← x + MLA(RMSNorm(x)); x ← x + FFN_or_MoE(RMSNorm(x)), of this rank's tokens [t, D].
#pragma once

#include "model/attention.h"
#include "model/moe.h"

namespace tessera {

struct BlockSaved {
  Tensor x_TD;  // the input, always kept (it is the block before's output)
  // Kept under Recompute::kNone and kSelective.
  Tensor mid_TD;  // after the attention's residual connection
  Tensor attention_rstd_T, ffn_rstd_T;
  AttentionSaved attention;
  Tensor ffn_h_T2I;  // dense only
  MoeSaved moe;      // MoE only
  // Kept under kNone, else recomputed: the norms' outputs.
  GemmOperand attention_y_TD, ffn_y_TD;
};

class Block {
 public:
  Block(Parameters& parameters, const ModelConfig& config, bool is_moe, const std::string& prefix, std::int64_t layer);

  /// Output of x_TD (which must stay as it is until the backward) into out_TD. `sums`: an MoE layer's.
  void forward(const LayerContext& context, const Tensor& x_TD, BlockSaved& saved, const Tensor& out_TD,
               const MoeSums& sums) const;

  /// d_TD: gradient of the output in, of the input out. Parameters' gradients +=.
  void backward(const LayerContext& context, BlockSaved& saved, const Tensor& d_TD) const;

  /// For one new token of each slot: as forward, with Attention::decode in place of the attention over a sequence.
  void decode(const LayerContext& context, const Tensor& x_TD, const Tensor& slot_T, const Tensor& cache_SPN,
              const Tensor& out_TD) const;

  /// Null for a dense block.
  const Moe* moe() const { return moe_ ? &*moe_ : nullptr; }

 private:
  /// Forms of what the second half reads.
  InputForms ffn_forms(const LayerContext& context) const;
  /// The second half: out_TD = mid_TD + FFN_or_MoE(y_TD), the latter in scratch_TD.
  void feed(const LayerContext& context, const GemmOperand& y_TD, BlockSaved& saved, const Tensor& scratch_TD,
            const Tensor& out_TD, const MoeSums& sums) const;
  void forward_keeping(const LayerContext& context, const Tensor& x_TD, BlockSaved& saved, const Tensor& out_TD,
                       const MoeSums& sums) const;
  void backward_from_saved(const LayerContext& context, const BlockSaved& saved, const Tensor& d_TD) const;

  ParamId attention_norm_;
  Attention attention_;
  ParamId ffn_norm_;
  std::optional<FeedForward> feed_forward_;
  std::optional<Moe> moe_;
};

}  // namespace tessera
