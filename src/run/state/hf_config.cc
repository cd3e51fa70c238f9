#include "run/state/hf_config.h"

#include <limits>

#include "base/error.h"
#include "base/json.h"
#include "base/text.h"

namespace tessera {
namespace {

/// The model type of a form, and the class that reads it.
struct Family {
  HfForm form;
  const char* model_type;
  const char* class_name;
  const char* topk_method;
};
constexpr Family kFamilies[] = {
    {HfForm::kDeepseekV2, "deepseek_v2", "DeepseekV2ForCausalLM", "greedy"},
    {HfForm::kDeepseekV3, "deepseek_v3", "DeepseekV3ForCausalLM", "noaux_tc"},
    {HfForm::kRemoteCode, "tessera", "TesseraForCausalLM", "noaux_tc"},
};

const Family& family_of(HfForm form) { return kFamilies[static_cast<std::size_t>(form)]; }

const Family& family_of(const std::string& model_type, const std::string& where) {
  for (const Family& family : kFamilies) {
    if (model_type == family.model_type) return family;
  }
  fail(
      "{}: \"model_type\" is \"{}\"; expected \"deepseek_v3\" (DeepSeek-V3), \"deepseek_v2\" (DeepSeek-V2-Lite) or "
      "\"tessera\" (written by tessera convert --form remote-code)",
      where, printable(model_type));
}

/// Default epsilon of the RMSNorm classes of DeepseekV2 and DeepseekV3; transformers uses it for the latents' norms.
constexpr float kHfLatentEps = 1e-6f;

/// Returns the number as people write it: 1e-05, not 9.999999747378752e-06.
double shortest(float value) { return std::stod(fmt::format("{}", value)); }

using Fields = JsonFields<>;

std::int64_t integer(const Fields& fields, const char* key) {
  return static_cast<std::int64_t>(fields.count(key, std::numeric_limits<std::int32_t>::max()));
}
std::int64_t integer(const Fields& fields, const char* key, std::int64_t otherwise) {
  return fields.find(key) == nullptr ? otherwise : integer(fields, key);
}
/// Returns 0 for null. The key itself must be there, because transformers has another default.
std::int64_t integer_or_null(const Fields& fields, const char* key) {
  require(fields.contains(key), "{} is missing", fields.place_of(key));
  return integer(fields, key, 0);
}
float number(const Fields& fields, const char* key) { return static_cast<float>(fields.number(key)); }
float number(const Fields& fields, const char* key, float otherwise) {
  return fields.find(key) == nullptr ? otherwise : number(fields, key);
}
std::string text(const Fields& fields, const char* key, const std::string& otherwise) {
  return fields.find(key) == nullptr ? otherwise : fields.text(key);
}

/// Throws Error if the key is there with another value.
void require_only(const Fields& fields, const char* key, const nlohmann::json& value) {
  const nlohmann::json* field = fields.find(key);
  if (field == nullptr) return;
  require(*field == value, "{} is {}; only {} is implemented", fields.place_of(key), describe_json(*field),
          value.dump());
}

/// Reads the numbers of layers, heads and experts, and the widths.
void read_sizes(const Fields& fields, bool is_v2, ModelConfig& m) {
  m.vocab_size = integer(fields, "vocab_size");
  m.dim = integer(fields, "hidden_size");
  m.inter_dim = integer(fields, "intermediate_size");
  m.moe_inter_dim = integer(fields, "moe_intermediate_size");
  m.n_layers = integer(fields, "num_hidden_layers");
  m.num_mtp_modules = integer(fields, "num_nextn_predict_layers", 0);
  m.n_heads = integer(fields, "num_attention_heads");
  m.q_lora_rank = integer_or_null(fields, "q_lora_rank");
  m.kv_lora_rank = integer(fields, "kv_lora_rank");
  m.qk_nope_head_dim = integer(fields, "qk_nope_head_dim");
  m.qk_rope_head_dim = integer(fields, "qk_rope_head_dim");
  m.v_head_dim = integer(fields, "v_head_dim");
  m.num_experts = integer(fields, "n_routed_experts");
  m.num_shared_experts = integer(fields, "n_shared_experts");
  m.top_k = integer(fields, "num_experts_per_tok");
  m.n_dense_layers = integer(fields, "first_k_dense_replace");
  if (!is_v2) {  // its method "greedy" ignores groups
    m.n_expert_groups = integer_or_null(fields, "n_group");
    m.n_limited_groups = integer_or_null(fields, "topk_group");
    if (m.n_expert_groups <= 1) m.n_expert_groups = m.n_limited_groups = 0;
  }
}

/// Reads RoPE's base and, if the model has it, YaRN's numbers.
void read_rope(const Fields& fields, const Family& family, const std::string& where, HfConfig& config) {
  ModelConfig& m = config.model;
  // transformers 5 writes "rope_parameters", which contains the base. Older versions write "rope_scaling".
  m.original_seq_len = config.seq_len;
  const char* rope_key = "rope_scaling";
  if (family.form == HfForm::kRemoteCode) {
    rope_key = "yarn";
  } else if (fields.find("rope_parameters") != nullptr) {
    rope_key = "rope_parameters";
  }
  if (const nlohmann::json* rope_object = fields.find(rope_key)) {
    const Fields rope(*rope_object, fields.place_of(rope_key));
    m.rope_theta = number(rope, "rope_theta", m.rope_theta);
    const std::string scaling = text(rope, "rope_type", text(rope, "type", "default"));
    require(scaling == "default" || scaling == "yarn", "{}: RoPE scaling \"{}\" is not implemented; expected yarn",
            where, printable(scaling));
    if (scaling == "yarn") {
      m.rope_factor = number(rope, "factor");
      m.original_seq_len = integer(rope, "original_max_position_embeddings");
      m.beta_fast = number(rope, "beta_fast", 32.0f);
      m.beta_slow = number(rope, "beta_slow", 1.0f);
      // With other values transformers also scales cosines and sines.
      m.mscale = number(rope, "mscale_all_dim");
      require(number(rope, "mscale") == m.mscale,
              "{}: \"mscale\" and \"mscale_all_dim\" are not the same number, which is not implemented", where);
      require(m.mscale != 0.0f || rope.find("attention_factor") != nullptr,
              "{}: \"mscale\" is 0 without \"attention_factor\": 1, which is not implemented", where);
      require_only(rope, "attention_factor", 1);
      require_only(rope, "truncate", true);
      require(
          m.original_seq_len < config.seq_len,
          "{}: YaRN without a longer sequence (\"original_max_position_embeddings\" {}, \"max_position_embeddings\" "
          "{}) is not implemented",
          where, m.original_seq_len, config.seq_len);
    }
  }
}

}  // namespace

const char* hf_class_name(HfForm form) { return family_of(form).class_name; }

HfForm plain_hf_form(const ModelConfig& config) {
  const bool has_softmax = config.n_dense_layers < config.n_layers && config.score_func == ScoreFunction::kSoftmax;
  return has_softmax ? HfForm::kDeepseekV2 : HfForm::kDeepseekV3;
}

std::vector<std::string> hf_obstacles(const HfConfig& config) {
  const ModelConfig& m = config.model;
  std::vector<std::string> obstacles;
  const auto add_if = [&](bool holds, const char* clause) {
    if (holds) obstacles.emplace_back(clause);
  };
  if (config.form == HfForm::kRemoteCode) return obstacles;
  if (config.form == HfForm::kDeepseekV2) {
    add_if(m.dim % m.n_heads != 0, "it takes only a dim that is a multiple of n_heads");
  }
  if (!config.has_experts()) return obstacles;
  add_if(m.num_shared_experts == 0, "it always has shared experts, and this model has none");
  if (config.form == HfForm::kDeepseekV3) {
    add_if(m.score_func != ScoreFunction::kSigmoid, "it scores experts with a sigmoid, this model with a softmax");
    add_if(m.num_experts < 2 * std::max<std::int64_t>(m.n_expert_groups, 1),
           "it needs two experts in every group, and this model has fewer");
    return obstacles;
  }
  add_if(m.score_func != ScoreFunction::kSoftmax, "it scores experts with a softmax, this model with a sigmoid");
  add_if(m.n_expert_groups > 1,
         "it scores a group of experts by the best one, this model by the sum of the two best (n_expert_groups)");
  add_if(m.route_norm, "it does not divide the routing weights by their sum, as this model does (route_norm)");
  return obstacles;
}

std::string hf_config_json(const HfConfig& config, DType dtype) {
  const ModelConfig& m = config.model;
  const Family& family = family_of(config.form);
  const std::vector<std::string> obstacles = hf_obstacles(config);
  require(obstacles.empty(), "{} cannot compute what this model does: {}", family.class_name,
          fmt::join(obstacles, "; "));
  const auto or_null = [](bool there, auto value) { return there ? nlohmann::ordered_json(value) : nullptr; };
  nlohmann::ordered_json json = {{"architectures", {family.class_name}},
                                 {"model_type", family.model_type},
                                 {"torch_dtype", dtype == DType::kFloat32 ? "float32" : "bfloat16"},
                                 {"vocab_size", m.vocab_size},
                                 {"hidden_size", m.dim},
                                 {"intermediate_size", m.inter_dim},
                                 {"moe_intermediate_size", m.moe_inter_dim},
                                 {"num_hidden_layers", m.n_layers},
                                 {"num_nextn_predict_layers", m.num_mtp_modules},
                                 {"num_attention_heads", m.n_heads},
                                 {"num_key_value_heads", m.n_heads},
                                 {"q_lora_rank", or_null(m.q_lora_rank > 0, m.q_lora_rank)},
                                 {"kv_lora_rank", m.kv_lora_rank},
                                 {"qk_nope_head_dim", m.qk_nope_head_dim},
                                 {"qk_rope_head_dim", m.qk_rope_head_dim},
                                 {"v_head_dim", m.v_head_dim},
                                 {"n_routed_experts", m.num_experts},
                                 {"n_shared_experts", m.num_shared_experts},
                                 {"num_experts_per_tok", m.top_k},
                                 {"first_k_dense_replace", m.n_dense_layers},
                                 {"moe_layer_freq", 1},
                                 {"n_group", std::max<std::int64_t>(m.n_expert_groups, 1)},
                                 {"topk_group", std::max<std::int64_t>(m.n_limited_groups, 1)},
                                 {"topk_method", family.topk_method},
                                 {"scoring_func", m.score_func == ScoreFunction::kSigmoid ? "sigmoid" : "softmax"},
                                 {"norm_topk_prob", m.route_norm},
                                 {"routed_scaling_factor", shortest(m.route_scale)},
                                 {"hidden_act", "silu"},
                                 {"rms_norm_eps", shortest(m.norm_eps)},
                                 {"attention_bias", false},
                                 {"attention_dropout", 0.0},
                                 {"tie_word_embeddings", false},
                                 {"use_cache", true},
                                 {"initializer_range", 0.02},
                                 {"max_position_embeddings", config.seq_len},
                                 {"rope_theta", shortest(m.rope_theta)},
                                 {"rope_interleave", true},
                                 {"rope_scaling", nullptr}};
  if (config.uses_yarn()) {
    json["rope_scaling"] = {{"type", "yarn"},
                            {"factor", shortest(m.rope_factor)},
                            {"original_max_position_embeddings", m.original_seq_len},
                            {"beta_fast", shortest(m.beta_fast)},
                            {"beta_slow", shortest(m.beta_slow)},
                            {"mscale", shortest(m.mscale)},
                            {"mscale_all_dim", shortest(m.mscale)}};
    // Without this key, transformers scales cosines and sines if mscale is 0.
    if (m.mscale == 0.0f) json["rope_scaling"]["attention_factor"] = 1.0;
  }
  if (config.form == HfForm::kRemoteCode) {
    // transformers rewrites what it finds under "rope_scaling", differently in each version. So the key is another one
    // here.
    json["yarn"] = json["rope_scaling"];
    json.erase("rope_scaling");
    json["auto_map"] = {{"AutoConfig", "configuration_tessera.TesseraConfig"},
                        {"AutoModelForCausalLM", "modeling_tessera.TesseraForCausalLM"}};
  }
  // Missing ids are null, because the classes have defaults, which would end a text at a token that is not EOS.
  json["bos_token_id"] = or_null(config.bos_id >= 0, config.bos_id);
  json["eos_token_id"] = or_null(config.eos_id >= 0, config.eos_id);
  return json.dump(2) + "\n";
}

std::vector<std::string> hf_differences(const HfConfig& config) {
  const ModelConfig& m = config.model;
  std::vector<std::string> differences;
  if (config.form == HfForm::kRemoteCode) return differences;
  if (m.norm_eps != kHfLatentEps) {
    differences.push_back(
        fmt::format("it normalises MLA's latents with epsilon {}; this model has norm_eps = {}, which changes its "
                    "logits by a few 1e-5 of the largest",
                    kHfLatentEps, m.norm_eps));
  }
  if (!config.uses_yarn()) return differences;
  const double ratio = static_cast<double>(config.seq_len) / static_cast<double>(m.original_seq_len);
  if (ratio != static_cast<double>(m.rope_factor)) {
    differences.push_back(
        fmt::format("versions before 5 scale RoPE by max_position_embeddings / original_max_position_embeddings = {}; "
                    "this model by {}",
                    ratio, m.rope_factor));
  }
  if (config.form == HfForm::kDeepseekV2 && m.mscale != 0.0f) {
    differences.emplace_back(
        "versions up to 5.12, at least, do not scale the attention scores by mscale, so their logits are far off; 5.23 "
        "does");
  }
  return differences;
}

HfConfig parse_hf_config(std::string_view json_text, const std::string& source) {
  const std::string where = fmt::format("'{}'", source);
  const nlohmann::json json = parse_json(json_text, where);
  const Fields fields(json, where + ", $");
  const Family& family = family_of(fields.text("model_type"), where);
  const bool is_v2 = family.form == HfForm::kDeepseekV2;
  require_only(fields, "hidden_act", "silu");
  require_only(fields, "attention_bias", false);
  require_only(fields, "tie_word_embeddings", false);
  require_only(fields, "moe_layer_freq", 1);
  require_only(fields, "topk_method", family.topk_method);
  require_only(fields, "rope_interleave", true);
  if (is_v2) {
    require_only(fields, "scoring_func", "softmax");
    require_only(fields, "norm_topk_prob", false);
    require_only(fields, "mlp_bias", false);
  }
  const std::string scores = text(fields, "scoring_func", is_v2 ? "softmax" : "sigmoid");
  require(scores == "sigmoid" || scores == "softmax", "{}: \"scoring_func\" is \"{}\"; expected sigmoid or softmax",
          where, printable(scores));
  const std::int64_t heads = integer(fields, "num_attention_heads");
  require(integer(fields, "num_key_value_heads", heads) == heads,
          "{}: \"num_key_value_heads\" is not \"num_attention_heads\"", where);

  HfConfig config;
  config.form = family.form;
  config.bos_id = integer(fields, "bos_token_id", -1);
  config.eos_id = integer(fields, "eos_token_id", -1);
  config.seq_len = integer(fields, "max_position_embeddings");
  require(config.seq_len > 0, "{}: \"max_position_embeddings\" is 0", where);
  ModelConfig& m = config.model;
  read_sizes(fields, is_v2, m);
  m.score_func = scores == "sigmoid" ? ScoreFunction::kSigmoid : ScoreFunction::kSoftmax;
  m.route_norm = fields.find("norm_topk_prob") == nullptr ? !is_v2 : fields.flag("norm_topk_prob");
  m.route_scale = number(fields, "routed_scaling_factor");
  m.norm_eps = number(fields, "rms_norm_eps", 1e-6f);
  m.rope_theta = number(fields, "rope_theta", 10000.0f);
  m.eos_id = config.eos_id;
  read_rope(fields, family, where, config);
  try {
    m.validate();
  } catch (const Error& error) {
    fail("{}: {}", where, error.what());
  }
  require(m.eos_id < m.vocab_size, "{}: \"eos_token_id\" {} is outside the vocabulary", where, m.eos_id);
  require(config.bos_id < m.vocab_size, "{}: \"bos_token_id\" {} is outside the vocabulary", where, config.bos_id);
  return config;
}

}  // namespace tessera
