// The sizes and options of a DeepSeek-V3 model, TorchTitan's four flavors of it, and the numbers that follow from the
// sizes. Names are those of TorchTitan's DeepSeekV3ModelArgs where the meaning is the same.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "ops/routing/score_function.h"

namespace tessera {

enum class AttentionMask { kCausal, kBlockCausal };

struct ModelConfig {
  std::int64_t vocab_size = 2048;
  std::int64_t dim = 256;
  std::int64_t inter_dim = 1024;     // hidden dim of a dense FFN
  std::int64_t moe_inter_dim = 256;  // hidden dim of one expert
  std::int64_t n_layers = 6;
  std::int64_t n_dense_layers = 1;  // the first layers, whose FFN is dense
  std::int64_t n_heads = 16;
  float norm_eps = 1e-5f;

  std::int64_t num_experts = 8;
  std::int64_t num_shared_experts = 2;
  std::int64_t top_k = 3;
  ScoreFunction score_func = ScoreFunction::kSoftmax;
  bool route_norm = false;
  float route_scale = 1.0f;
  float load_balance_coeff = 1e-3f;  // step of the expert bias
  std::int64_t n_expert_groups = 0;  // 0: no groups
  std::int64_t n_limited_groups = 0;
  float seq_balance_loss_coeff = 0.0f;

  std::int64_t q_lora_rank = 0;  // 0: queries are not compressed
  std::int64_t kv_lora_rank = 512;
  std::int64_t qk_nope_head_dim = 128;
  std::int64_t qk_rope_head_dim = 64;
  std::int64_t v_head_dim = 128;
  AttentionMask attn_mask_type = AttentionMask::kCausal;
  std::int64_t eos_id = -1;  // ends a document; -1: the tokenizer's

  // RoPE, and YaRN (arXiv 2309.00071) if the training length is above original_seq_len. A "turn" is a full rotation of
  // a pair of dims within original_seq_len.
  std::int64_t original_seq_len = 4096;  // in tokens
  float rope_theta = 10000.0f;           // base of the frequencies
  float rope_factor = 40.0f;             // divides the frequencies of slow pairs
  float beta_fast = 32.0f;               // pairs with more turns keep their frequency
  float beta_slow = 1.0f;                // pairs with fewer turns have theirs divided; those between, partly
  float mscale = 0.70f;                  // scores are multiplied by (0.1 · mscale · ln(rope_factor) + 1)²

  // Multi-token prediction (arXiv 2412.19437, section 2.2).
  std::int64_t num_mtp_modules = 0;
  float mtp_loss_weight = 0.3f;  // λ: the weight of the modules' mean loss

  std::int64_t qk_head_dim() const { return qk_nope_head_dim + qk_rope_head_dim; }
  bool is_moe_layer(std::int64_t layer) const { return layer >= n_dense_layers; }
  /// Returns the number of MoE layers, including those of multi-token prediction.
  std::int64_t num_moe_layers() const {
    return n_layers > n_dense_layers ? n_layers - n_dense_layers + num_mtp_modules : 0;
  }
  /// Returns the scale of the attention scores: qk_head_dim^-½, times YaRN's m² beyond the original sequence length.
  float softmax_scale(std::int64_t seq_len) const;

  /// Throws Error, naming the keys and their values, if these numbers cannot make a model.
  void validate() const;
};

/// Returns the sizes of "debugmodel", "16B", "236B" or "671B". Throws Error, which names these, for another name.
ModelConfig model_flavor(std::string_view name);
std::vector<std::string> model_flavor_names();

/// Holds the numbers of parameters, counted as TorchTitan counts them.
struct ParameterCounts {
  std::int64_t total;
  std::int64_t embedding;
  std::int64_t dense;   // all but the routers, shared and routed experts
  std::int64_t sparse;  // routers, shared and routed experts
  std::int64_t active;  // dense + sparse with only top_k of the routed experts
};

/// Returns the FLOP of forward and backward per token, counted as TorchTitan does: 6 · (active - embedding) + 6 ·
/// layers · heads · (qk + v dims) · seq_len. MTP modules count with their parameters only. Their attention, and their
/// use of the output projection, are left out.
double flop_per_token(const ModelConfig& config, const ParameterCounts& counts, std::int64_t seq_len);

}  // namespace tessera
