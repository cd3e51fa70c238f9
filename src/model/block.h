// A transformer block: x ← x + MLA(RMSNorm(x)); x ← x + FFN_or_MoE(RMSNorm(x)), of this rank's tokens [t, D].
#pragma once

#include "model/attention.h"
#include "model/moe.h"

namespace tessera {

struct BlockSaved {
  Tensor x_tD;  // the input, always kept (it is the block before's output)
  // Kept under Recompute::kNone and kSelective.
  Tensor mid_tD;  // after the attention's residual connection
  Tensor attention_rstd_t, ffn_rstd_t;
  AttentionSaved attention;
  Tensor ffn_h_T2I;  // dense only
  MoeSaved moe;      // MoE only
  // Kept under kNone, else recomputed: the norms' outputs.
  GemmOperand attention_y_tD, ffn_y_tD;
};

class Block {
 public:
  Block(Parameters& parameters, const ModelConfig& config, bool is_moe, const std::string& prefix, std::int64_t layer);

  /// Output of x_tD (which must stay as it is until the backward) into out_tD. `sums`: an MoE layer's.
  void forward(const LayerContext& context, const Tensor& x_tD, BlockSaved& saved, const Tensor& out_tD,
               const MoeSums& sums) const;

  /// d_tD: gradient of the output in, of the input out. Parameters' gradients +=.
  void backward(const LayerContext& context, BlockSaved& saved, const Tensor& d_tD) const;

  /// For one new token of each slot: as forward, with Attention::decode in place of the attention over a sequence.
  void decode(const LayerContext& context, const Tensor& x_TD, const Tensor& slot_T, const Tensor& cache_SPN,
              const Tensor& out_TD) const;

  /// Null for a dense block.
  const Moe* moe() const { return moe_ ? &*moe_ : nullptr; }

 private:
  /// Forms of what the second half reads.
  InputForms ffn_forms(const LayerContext& context) const;
  /// The second half: out_tD = mid_tD + FFN_or_MoE(y_tD), the latter in scratch_tD.
  void feed(const LayerContext& context, const GemmOperand& y_tD, BlockSaved& saved, const Tensor& scratch_tD,
            const Tensor& out_tD, const MoeSums& sums) const;
  void forward_keeping(const LayerContext& context, const Tensor& x_tD, BlockSaved& saved, const Tensor& out_tD,
                       const MoeSums& sums) const;
  void backward_from_saved(const LayerContext& context, const BlockSaved& saved, const Tensor& d_tD) const;

  ParamId attention_norm_;
  Attention attention_;
  ParamId ffn_norm_;
  std::optional<FeedForward> feed_forward_;
  std::optional<Moe> moe_;
};

}  // namespace tessera
