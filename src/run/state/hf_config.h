// Converts ModelConfig to and from config.json of the Hugging Face folders that are written and read.
// docs/checkpoints.md says what each form can hold.
#pragma once

#include <string>
#include <string_view>

#include "model/config.h"
#include "tensor/dtype.h"

namespace tessera {

inline constexpr const char* kHfConfigName = "config.json";

/// Names the class of transformers that a folder is for.
enum class HfForm {
  kDeepseekV2,  // softmax scores, no expert bias
  kDeepseekV3,  // sigmoid scores
  kRemoteCode,  // any model; the folder has its own modeling code (checkpoint/remote_code.h)
};

/// Returns "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM" or "TesseraForCausalLM".
const char* hf_class_name(HfForm form);
/// Returns the form for transformers' own class whose router has this model's score function.
HfForm plain_hf_form(const ModelConfig& config);

/// Holds the content of config.json: the model, and what else the file says.
struct HfConfig {
  ModelConfig model;
  HfForm form = HfForm::kDeepseekV3;
  /// The number of positions that the model is made for. If it exceeds model.original_seq_len, YaRN scales RoPE.
  std::int64_t seq_len = 0;
  std::int64_t bos_id = -1, eos_id = -1;  // -1: not given

  bool has_experts() const { return model.n_dense_layers < model.n_layers; }
  bool uses_yarn() const { return seq_len > model.original_seq_len; }
};

/// Returns why the form's class cannot compute what this model does, as far as the configuration shows. Returns nothing
/// if it can. Each reason is a clause whose subject is the class. DeepseekV2ForCausalLM also requires that all expert
/// biases are 0.
std::vector<std::string> hf_obstacles(const HfConfig& config);

/// Returns the text of config.json. Throws Error if there are obstacles.
std::string hf_config_json(const HfConfig& config, DType dtype);

/// Returns small differences between the form's class and this model, in all or some versions of transformers, that no
/// key of config.json removes. Each is one sentence.
std::vector<std::string> hf_differences(const HfConfig& config);

/// Parses config.json. `source` names the text in errors. Keys without a counterpart in this engine are ignored. Values
/// that it cannot honour (attention biases, tied embeddings, another activation) are Errors.
HfConfig parse_hf_config(std::string_view json_text, const std::string& source);

}  // namespace tessera
