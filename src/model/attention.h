// Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values come from a latent of kv_lora_rank
// numbers per token, queries optionally from one of q_lora_rank.
#pragma once

#include "model/gemm_site.h"
#include "ops/mla_attention.h"
#include "ops/rope.h"

namespace tessera {

struct AttentionSaved {
  // Kept under Recompute::kNone and kSelective.
  Tensor kv_a;  // [T, kv_lora + rope]: latent before its norm | k_rope before rotation
  Tensor kv_rstd_T;
  Tensor q_a_TC, q_rstd_T;  // the queries' latent before its norm; only with query compression
  GemmOperand o;
  Tensor lse_TH;
  // Kept under kNone, else recomputed.
  GemmOperand kv_latent_TC, q_latent_TC;  // after their norms
  Tensor q, kv, k_rope;                   // what the attention core reads; q without compression is always kept
};

class Attention {
 public:
  /// Adds the parameters `prefix`wq..., `layer` sets the initial deviation.
  Attention(Parameters& parameters, const ModelConfig& config, const std::string& prefix, std::int64_t layer);

  /// Forms of y_TD.
  InputForms y_forms(const LayerContext& context) const;
  /// Memory for what the forward keeps.
  void allocate_saved(const LayerContext& context, AttentionSaved& saved) const;
  /// After allocate_saved: out_TD = MLA(y_TD). An undefined out_TD: only what the backward needs.
  void forward(const LayerContext& context, const GemmOperand& y_TD, const AttentionSaved& saved,
               const Tensor& out_TD) const;

  /// d_y_TD from d_out_TD; parameters' gradients +=.
  void backward(const LayerContext& context, const GemmOperand& y_TD, const AttentionSaved& saved,
                const Tensor& d_out_TD, const Tensor& d_y_TD) const;

  /// out_TD for one new token of each slot, T slots: token t is at `positions` (context.batch) of slot t. Its latent
  /// and k_rope go into cache_SPN, and it attends to all that the slot holds (ops/mla_decode.h).
  void decode(const LayerContext& context, const Tensor& y_TD, const Tensor& slot_T, const Tensor& cache_SPN,
              const Tensor& out_TD) const;

 private:
  MlaDims dims(const LayerContext& context) const;
  void allocate_recomputed(const LayerContext& context, AttentionSaved& saved) const;
  /// `for_wgrad`: the latents also in the forms that their weights' gradients read.
  void compute_recomputed(const LayerContext& context, AttentionSaved& saved, bool for_wgrad) const;
  /// A latent's norm, in the forms that the forward reads and, if for_wgrad, the weight's gradient; and its projection.
  GemmOperand project_up(const LayerContext& context, const Tensor& latent, ParamId norm, ParamId site, bool for_wgrad,
                         const GemmOperand& have, const Tensor& rstd_T, const Tensor& out) const;
  void rotate(const LayerContext& context, const Tensor& x, std::int64_t num_heads, RopeDirection direction,
              const Tensor& y) const;

  bool compresses_queries_;
  ParamId wq_ = 0, wq_a_ = 0, q_norm_ = 0, wq_b_ = 0;
  ParamId wkv_a_, kv_norm_, wkv_b_, wo_;
};

}  // namespace tessera
