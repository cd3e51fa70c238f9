// Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434). Keys and values come from a latent of kv_lora_rank
// numbers per token. Queries optionally come from a latent of q_lora_rank numbers.
//
// Tensor-parallel ranks have H / tp of the heads each. Latents are computed where the tokens are, and then gathered.
// The queries' latents are gathered for a micro-batch's tokens. The keys' latents, with the shared k_rope, are also
// gathered over context-parallel ranks: 576 numbers per token in DeepSeek-V3. All these ranks rebuild the keys and
// values that they need (model/token_exchange.h).
#pragma once

#include <optional>

#include "model/gemm_site.h"
#include "model/norm.h"
#include "ops/attention/mla_attention.h"

namespace tessera {

struct AttentionSaved {
  // These are kept under Recompute::kNone and Recompute::kSelective.
  Tensor kv_a_tC;  // [t, kv_lora + rope]: latent before its norm | k_rope before rotation
  Tensor kv_rstd_t;
  Tensor q_a_tC, q_rstd_t;  // the queries' latent before its norm; only with query compression
  GemmOperand o;            // the heads' outputs, [T, H · v_head]
  Tensor lse_TH;            // float32
  // These are kept under Recompute::kNone. Otherwise they are recomputed.
  GemmOperand kv_latent_KC, q_latent_TC;  // after their norms
  // What the attention core reads: q [T, H · qk_head], kv [K, H · (qk_nope + v_head)] and k_rope [K, rope], after RoPE.
  // H counts this rank's heads, and K the tokens of whole sequences. q without compression is always kept.
  Tensor q, kv, k_rope;
};

class Attention {
 public:
  /// Adds the parameters `prefix`wq and so on. `layer` sets the initial standard deviation. y_tD, out_tD and their
  /// gradients are [t, D].
  Attention(Parameters& parameters, const ModelConfig& config, const std::string& prefix, std::int64_t layer);

  /// Returns the forms in which the attention reads y_tD.
  InputForms y_forms(const LayerContext& context) const;
  /// Allocates what the forward keeps.
  void allocate_saved(const LayerContext& context, AttentionSaved& saved) const;
  /// Computes out_tD = MLA(y_tD), after allocate_saved. If out_tD is undefined, computes only what the backward needs.
  void forward(const LayerContext& context, const GemmOperand& y_tD, const AttentionSaved& saved,
               const Tensor& out_tD) const;

  /// Computes d_y_tD from d_out_tD, and adds to the parameters' gradients.
  void backward(const LayerContext& context, const GemmOperand& y_tD, const AttentionSaved& saved,
                const Tensor& d_out_tD, const Tensor& d_y_tD) const;

  /// Computes out_TD for one new token of each of T slots. context.batch gives the token's position in its slot. The
  /// token's latent and k_rope go into cache_SPN. It attends to all that the slot holds (ops/attention/mla_decode.h).
  void decode(const LayerContext& context, const Tensor& y_TD, const Tensor& slot_T, const Tensor& cache_SPN,
              const Tensor& out_TD) const;

 private:
  MlaDims dims(const LayerContext& context) const;
  MlaOperands core_operands(const LayerContext& context, const AttentionSaved& saved) const;
  void allocate_core_inputs(const LayerContext& context, AttentionSaved& saved) const;
  /// Computes q, kv and k_rope, which the attention core reads, from the latents. Under kSelective the backward calls
  /// it again. `reader` says which products will read the latents.
  void compute_core_inputs(const LayerContext& context, AttentionSaved& saved, LinearSite::Reader reader) const;
  /// Rotates x by the tokens' positions (RoPE).
  void rotate(const LayerContext& context, const Tensor& x, const Tensor& positions, std::int64_t num_heads,
              RopeDirection direction, const Tensor& y) const;

  /// Holds the sites of queries that come from a latent. Without compression, queries come from the input. The order of
  /// the members is that of the parameters.
  struct CompressedQueries {
    LinearSite wq_a;
    RmsNorm norm;
    LinearSite wq_b;
  };
  std::optional<CompressedQueries> compressed_;
  std::optional<LinearSite> wq_;
  LinearSite wkv_a_;
  RmsNorm kv_norm_;
  LinearSite wkv_b_, wo_;
  LayerRope rope_;
};

}  // namespace tessera
