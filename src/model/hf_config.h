// config.json of Hugging Face's DeepseekV3ForCausalLM (transformers, model_type "deepseek_v3"), to and from
// ModelConfig.
#pragma once

#include <string>
#include <string_view>

#include "model/config.h"

namespace tessera {

inline constexpr const char* kHfConfigName = "config.json";

/// What config.json says besides the model's numbers.
struct HfConfig {
  ModelConfig model;
  /// Positions that the model is made for. RoPE is scaled by YaRN if they are more than model.original_seq_len.
  std::int64_t seq_len = 0;
  std::int64_t bos_id = -1, eos_id = -1;  // -1: not said
};

/// Throws Error for a model that DeepseekV3ForCausalLM cannot hold (no shared experts).
std::string hf_config_json(const HfConfig& config, DType dtype);

/// What transformers' DeepseekV3 computes differently whatever config.json says; empty if nothing. A sentence each.
std::vector<std::string> hf_differences(const HfConfig& config);

/// `source` names the text in errors. Keys that this engine has no counterpart for are not looked at; values that it
/// cannot honour (attention biases, tied embeddings, another activation) are Errors.
HfConfig parse_hf_config(std::string_view json_text, const std::string& source);

}  // namespace tessera
