// config.json of the Hugging Face folders that are written and read, to and from ModelConfig. docs/checkpoints.md says
// what each form can hold.
#pragma once

#include <string>
#include <string_view>

#include "model/config.h"
#include "tensor/dtype.h"

namespace tessera {

inline constexpr const char* kHfConfigName = "config.json";

/// The class of transformers that a folder is for.
enum class HfForm {
  kDeepseekV2,  // softmax scores, no expert bias
  kDeepseekV3,  // sigmoid scores
  kRemoteCode,  // any model; the folder brings its own modeling code (checkpoint/remote_code.h)
};

/// "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "TesseraForCausalLM".
const char* hf_class_name(HfForm form);
/// The class of transformers itself whose router has this model's score function.
HfForm plain_hf_form(const ModelConfig& config);

/// What config.json says besides the model's numbers.
struct HfConfig {
  ModelConfig model;
  HfForm form = HfForm::kDeepseekV3;
  /// Positions that the model is made for. RoPE is scaled by YaRN if they are more than model.original_seq_len.
  std::int64_t seq_len = 0;
  std::int64_t bos_id = -1, eos_id = -1;  // -1: not said

  bool has_experts() const { return model.n_dense_layers < model.n_layers; }
  bool uses_yarn() const { return seq_len > model.original_seq_len; }
};

/// Why the form's class cannot compute what this model does, as far as the configuration tells; empty if it can. One
/// clause each, whose subject is the class. DeepseekV2ForCausalLM also requires that all expert biases are 0.
std::vector<std::string> hf_obstacles(const HfConfig& config);

/// Throws Error if there are obstacles.
std::string hf_config_json(const HfConfig& config, DType dtype);

/// Small differences between the form's class and this model, in all or in some versions of transformers, which no key
/// of config.json removes. One sentence each.
std::vector<std::string> hf_differences(const HfConfig& config);

/// `source` names the text in errors. Keys that this engine has no counterpart for are not looked at; values that it
/// cannot honour (attention biases, tied embeddings, another activation) are Errors.
HfConfig parse_hf_config(std::string_view json_text, const std::string& source);

}  // namespace tessera
