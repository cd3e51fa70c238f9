#include "model/hf_config.h"

#include <limits>

#include "base/json.h"

namespace tessera {
namespace {

constexpr const char* kModelType = "deepseek_v3";
/// DeepseekV3RMSNorm's default, which transformers uses for the latents' norms.
constexpr float kHfLatentEps = 1e-6f;

/// A number as people write it: 1e-05, not 9.999999747378752e-06.
double shortest(float value) { return std::stod(fmt::format("{}", value)); }

using Fields = JsonFields<>;

std::int64_t integer(const Fields& fields, const char* key) {
  return static_cast<std::int64_t>(fields.count(key, std::numeric_limits<std::int32_t>::max()));
}
std::int64_t integer(const Fields& fields, const char* key, std::int64_t otherwise) {
  return fields.find(key) == nullptr ? otherwise : integer(fields, key);
}
/// 0 for null; the key itself must be there, because transformers' default is another.
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

/// Error if the key is there with another value.
void require_only(const Fields& fields, const char* key, const nlohmann::json& value) {
  const nlohmann::json* field = fields.find(key);
  if (field == nullptr) return;
  require(*field == value, "{} is {}; only {} is implemented", fields.place_of(key), describe_json(*field),
          value.dump());
}

}  // namespace

std::string hf_config_json(const HfConfig& config, DType dtype) {
  const ModelConfig& m = config.model;
  const bool has_experts = m.n_dense_layers < m.n_layers;
  require(!has_experts || m.num_shared_experts > 0,
          "a model without shared experts (model.args.num_shared_experts is 0) has no form as DeepseekV3ForCausalLM");
  nlohmann::ordered_json json = {{"architectures", {"DeepseekV3ForCausalLM"}},
                                 {"model_type", kModelType},
                                 {"torch_dtype", dtype == DType::kFloat32 ? "float32" : "bfloat16"},
                                 {"vocab_size", m.vocab_size},
                                 {"hidden_size", m.dim},
                                 {"intermediate_size", m.inter_dim},
                                 {"moe_intermediate_size", m.moe_inter_dim},
                                 {"num_hidden_layers", m.n_layers},
                                 {"num_nextn_predict_layers", m.num_mtp_modules},
                                 {"num_attention_heads", m.n_heads},
                                 {"num_key_value_heads", m.n_heads},
                                 {"q_lora_rank", m.q_lora_rank > 0 ? nlohmann::ordered_json(m.q_lora_rank) : nullptr},
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
                                 {"topk_method", "noaux_tc"},
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
  if (config.seq_len > m.original_seq_len) {
    json["rope_scaling"] = {{"type", "yarn"},
                            {"factor", shortest(m.rope_factor)},
                            {"original_max_position_embeddings", m.original_seq_len},
                            {"beta_fast", shortest(m.beta_fast)},
                            {"beta_slow", shortest(m.beta_slow)},
                            {"mscale", shortest(m.mscale)},
                            {"mscale_all_dim", shortest(m.mscale)}};
  }
  if (config.bos_id >= 0) json["bos_token_id"] = config.bos_id;
  if (config.eos_id >= 0) json["eos_token_id"] = config.eos_id;
  return json.dump(2) + "\n";
}

std::vector<std::string> hf_differences(const HfConfig& hf_config) {
  const ModelConfig& config = hf_config.model;
  std::vector<std::string> differences;
  const bool has_experts = config.n_dense_layers < config.n_layers;
  if (has_experts && config.score_func == ScoreFunction::kSoftmax) {
    differences.emplace_back("its router scores with a sigmoid; this model's is softmax, so its logits differ there");
  }
  if (config.norm_eps != kHfLatentEps) {
    differences.push_back(
        fmt::format("it normalises MLA's latents with epsilon {}; this model has {}", kHfLatentEps, config.norm_eps));
  }
  if (hf_config.seq_len <= config.original_seq_len) return differences;
  if (config.mscale == 0.0f) {
    differences.emplace_back("its YaRN scales cosines and sines if mscale is 0, as it is here");
  }
  const double ratio = static_cast<double>(hf_config.seq_len) / static_cast<double>(config.original_seq_len);
  if (ratio != static_cast<double>(config.rope_factor)) {
    differences.push_back(
        fmt::format("versions before 5 scale RoPE by max_position_embeddings / original_max_position_embeddings = {}; "
                    "this model by {}",
                    ratio, config.rope_factor));
  }
  return differences;
}

HfConfig parse_hf_config(std::string_view json_text, const std::string& source) {
  const std::string where = fmt::format("'{}'", source);
  const nlohmann::json json = parse_json(json_text, where);
  const Fields fields(json, where + ", $");
  const std::string type = text(fields, "model_type", "");
  require(type == kModelType, "{}: \"model_type\" is \"{}\"; only \"{}\" is implemented", where, type, kModelType);
  require_only(fields, "hidden_act", "silu");
  require_only(fields, "attention_bias", false);
  require_only(fields, "tie_word_embeddings", false);
  require_only(fields, "moe_layer_freq", 1);
  require_only(fields, "topk_method", "noaux_tc");
  require_only(fields, "rope_interleave", true);
  const std::string scores = text(fields, "scoring_func", "sigmoid");
  require(scores == "sigmoid" || scores == "softmax", "{}: \"scoring_func\" is \"{}\"; expected sigmoid or softmax",
          where, scores);
  const std::int64_t heads = integer(fields, "num_attention_heads");
  require(integer(fields, "num_key_value_heads", heads) == heads,
          "{}: \"num_key_value_heads\" is not \"num_attention_heads\"", where);

  HfConfig config;
  config.bos_id = integer(fields, "bos_token_id", -1);
  config.eos_id = integer(fields, "eos_token_id", -1);
  config.seq_len = integer(fields, "max_position_embeddings");
  require(config.seq_len > 0, "{}: \"max_position_embeddings\" is 0", where);
  ModelConfig& m = config.model;
  m.vocab_size = integer(fields, "vocab_size");
  m.dim = integer(fields, "hidden_size");
  m.inter_dim = integer(fields, "intermediate_size");
  m.moe_inter_dim = integer(fields, "moe_intermediate_size");
  m.n_layers = integer(fields, "num_hidden_layers");
  m.num_mtp_modules = integer(fields, "num_nextn_predict_layers", 0);
  m.n_heads = heads;
  m.q_lora_rank = integer_or_null(fields, "q_lora_rank");
  m.kv_lora_rank = integer(fields, "kv_lora_rank");
  m.qk_nope_head_dim = integer(fields, "qk_nope_head_dim");
  m.qk_rope_head_dim = integer(fields, "qk_rope_head_dim");
  m.v_head_dim = integer(fields, "v_head_dim");
  m.num_experts = integer(fields, "n_routed_experts");
  m.num_shared_experts = integer(fields, "n_shared_experts");
  m.top_k = integer(fields, "num_experts_per_tok");
  m.n_dense_layers = integer(fields, "first_k_dense_replace");
  m.n_expert_groups = integer_or_null(fields, "n_group");
  m.n_limited_groups = integer_or_null(fields, "topk_group");
  if (m.n_expert_groups <= 1) m.n_expert_groups = m.n_limited_groups = 0;
  m.score_func = scores == "sigmoid" ? ScoreFunction::kSigmoid : ScoreFunction::kSoftmax;
  m.route_norm = fields.find("norm_topk_prob") == nullptr || fields.flag("norm_topk_prob");
  m.route_scale = number(fields, "routed_scaling_factor");
  m.norm_eps = number(fields, "rms_norm_eps", 1e-6f);
  m.rope_theta = number(fields, "rope_theta", 10000.0f);
  m.eos_id = config.eos_id;
  // transformers 5 writes "rope_parameters" with the base in it, older versions "rope_scaling".
  m.original_seq_len = config.seq_len;
  const char* rope_key = fields.find("rope_parameters") != nullptr ? "rope_parameters" : "rope_scaling";
  if (const nlohmann::json* rope_object = fields.find(rope_key)) {
    const Fields rope(*rope_object, fields.place_of(rope_key));
    m.rope_theta = number(rope, "rope_theta", m.rope_theta);
    const std::string scaling = text(rope, "rope_type", text(rope, "type", "default"));
    require(scaling == "default" || scaling == "yarn", "{}: RoPE scaling \"{}\" is not implemented; expected yarn",
            where, scaling);
    if (scaling == "yarn") {
      m.rope_factor = number(rope, "factor");
      m.original_seq_len = integer(rope, "original_max_position_embeddings");
      m.beta_fast = number(rope, "beta_fast", 32.0f);
      m.beta_slow = number(rope, "beta_slow", 1.0f);
      // With other values transformers scales cosines and sines as well.
      m.mscale = number(rope, "mscale_all_dim");
      require(number(rope, "mscale") == m.mscale && m.mscale > 0.0f,
              "{}: \"mscale\" and \"mscale_all_dim\" are not the same number above 0, which is not implemented", where);
      require(rope.find("attention_factor") == nullptr, "{}: \"attention_factor\" is not implemented", where);
      require_only(rope, "truncate", true);
      require(
          m.original_seq_len < config.seq_len,
          "{}: YaRN without a longer sequence (\"original_max_position_embeddings\" {}, \"max_position_embeddings\" "
          "{}) is not implemented",
          where, m.original_seq_len, config.seq_len);
    }
  }
  try {
    m.validate();
  } catch (const Error& error) {
    fail("{}: {}", where, error.what());
  }
  require(m.eos_id < m.vocab_size, "{}: \"eos_token_id\" {} is outside the vocabulary", where, m.eos_id);
  return config;
}

}  // namespace tessera
