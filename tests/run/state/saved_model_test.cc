// Loads weights from Hugging Face's files. Compares logits with those of transformers on the same files
// (tests/reference/make_hf_goldens.py). Also tests files that are not as they should be.
#include "run/state/saved_model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "generate/decoder.h"
#include "mx/formats.h"
#include "tests/compare.h"
#include "tests/data/support.h"
#include "tests/forward.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using data::TemporaryFolder;

fs::path golden(const std::string& name) { return fs::path(TESSERA_TEST_DATA) / "golden" / "hf" / name; }

template <typename T>
std::vector<T> numbers_of(const SafetensorsEntry& entry) {
  std::vector<T> numbers(entry.bytes.size() / sizeof(T));
  std::memcpy(numbers.data(), entry.bytes.data(), entry.bytes.size());
  return numbers;
}

/// Compares the model in each folder with what transformers computes from it.
class HfModel : public ::testing::TestWithParam<const char*> {
 protected:
  HfModel()
      : file_(golden(GetParam()) / "golden.safetensors"),
        saved_(golden(GetParam())),
        model_(saved_.config().model,
               {.compute = DType::kFloat32, .seq_len = saved_.config().seq_len, .max_tokens = 128}) {
    model_.parameters().allocate_weights(DType::kFloat32);
    saved_.load(model_.parameters(), saved_.config().model);
  }

  SafetensorsFile file_;
  SavedModel saved_;
  Model model_;
};

TEST_P(HfModel, LogitsAreThoseOfTransformers) {
  const SafetensorsEntry& entry = file_.at("tokens");
  const auto tokens = numbers_of<std::int32_t>(entry);
  const auto expected = numbers_of<float>(file_.at("logits"));
  const std::vector<float> logits = forward_logits(model_, tokens, entry.shape[0]);
  EXPECT_LE(relative_difference(logits, expected), 1e-5);
  EXPECT_GT(*std::max_element(expected.begin(), expected.end()), 1.0f);
}

TEST_P(HfModel, GreedyTextIsThatOfTransformers) {
  const SafetensorsEntry &prompts = file_.at("prompts"), &greedy = file_.at("greedy");
  const auto prompt_ids = numbers_of<std::int32_t>(prompts), expected = numbers_of<std::int32_t>(greedy);
  const std::int64_t num_prompt = prompts.shape[1], num_new = greedy.shape[1];
  Decoder decoder(model_, {.seq_len = saved_.config().seq_len, .num_slots = 1, .num_positions = num_prompt + num_new});
  std::vector<std::int32_t> texts;
  for (std::int64_t text = 0; text < prompts.shape[0]; ++text) {
    std::span<const float> logits = decoder.prefill(
        0, std::span(prompt_ids)
               .subspan(static_cast<std::size_t>(text * num_prompt), static_cast<std::size_t>(num_prompt)));
    for (std::int64_t i = 0; i < num_new; ++i) {
      if (i > 0) logits = decoder.decode(std::span(texts).last(1));
      texts.push_back(static_cast<std::int32_t>(std::ranges::max_element(logits) - logits.begin()));
    }
  }
  EXPECT_EQ(texts, expected);
}

INSTANTIATE_TEST_SUITE_P(Cases, HfModel, ::testing::Values("groups", "yarn", "fp8", "v2", "v2_yarn", "remote_code"));

TEST(HfNames, OfDeepSeekV3) {
  const auto names = [](const std::string& name, const Shape& shape) {
    std::vector<std::string> result;
    for (const HfTensor& tensor : hf_tensors(name, shape, 61)) {
      result.push_back(tensor.name + fmt::format(" [{}]", fmt::join(tensor.shape, ",")));
    }
    return result;
  };
  using ::testing::ElementsAre;
  EXPECT_THAT(names("layers.3.attention.wkv_b.weight", {8, 4}),
              ElementsAre("model.layers.3.self_attn.kv_b_proj.weight [8,4]"));
  EXPECT_THAT(names("layers.60.moe.expert_bias", {256}),
              ElementsAre("model.layers.60.mlp.gate.e_score_correction_bias [256]"));
  EXPECT_THAT(names("layers.3.moe.experts.w13", {2, 6, 4}),
              ElementsAre("model.layers.3.mlp.experts.0.gate_proj.weight [3,4]",
                          "model.layers.3.mlp.experts.0.up_proj.weight [3,4]",
                          "model.layers.3.mlp.experts.1.gate_proj.weight [3,4]",
                          "model.layers.3.mlp.experts.1.up_proj.weight [3,4]"));
  EXPECT_THAT(names("layers.3.moe.shared_experts.w2.weight", {4, 3}),
              ElementsAre("model.layers.3.mlp.shared_experts.down_proj.weight [4,3]"));
  EXPECT_THAT(names("layers.0.feed_forward.w13.weight", {6, 4}),
              ElementsAre("model.layers.0.mlp.gate_proj.weight [3,4]", "model.layers.0.mlp.up_proj.weight [3,4]"));
  EXPECT_THAT(names("mtp.0.block.attention.wo.weight", {4, 4}),
              ElementsAre("model.layers.61.self_attn.o_proj.weight [4,4]"));
  EXPECT_THAT(names("mtp.0.norm.weight", {4}), ElementsAre("model.layers.61.shared_head.norm.weight [4]"));
  EXPECT_THAT(names("output.weight", {8, 4}), ElementsAre("lm_head.weight [8,4]"));
}

/// Writes tensors of any type as model.safetensors.
void write_weights(const fs::path& folder, const std::vector<SafetensorsSpec>& specs,
                   const std::vector<std::vector<std::byte>>& data) {
  fs::create_directories(folder);
  SafetensorsWriter writer(folder / "model.safetensors", specs, {});
  for (const auto& bytes : data) writer.append(bytes);
  writer.finish();
}

template <typename T>
std::vector<std::byte> bytes_of(const std::vector<T>& numbers) {
  const auto bytes = std::as_bytes(std::span(numbers));
  return {bytes.begin(), bytes.end()};
}

TEST(HfWeights, Fp8BlocksWithTailsInBothDirections) {
  const TemporaryFolder scratch;
  const std::int64_t rows = 130, columns = 300;
  std::vector<std::uint8_t> codes(static_cast<std::size_t>(rows * columns));
  for (std::size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<std::uint8_t>(i * 37 % 0x7f);
  const std::vector<float> scales = {0.5f, 2.0f, 3.0f, 5.0f, 7.0f, 11.0f};  // shape [2, 3]
  write_weights(scratch.path(), {{"w", "F8_E4M3", {rows, columns}}, {"w_scale_inv", "F32", {2, 3}}},
                {bytes_of(codes), bytes_of(scales)});
  std::vector<float> numbers;
  HfWeights(scratch.path()).read({"w", {rows, columns}}, [&](std::span<const float> chunk) {
    numbers.insert(numbers.end(), chunk.begin(), chunk.end());
  });
  ASSERT_EQ(numbers.size(), codes.size());
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < columns; ++c) {
      const auto i = static_cast<std::size_t>(r * columns + c);
      const float scale = scales[static_cast<std::size_t>((r >= 128 ? 3 : 0) + c / 128)];
      ASSERT_EQ(numbers[i], mx::value_of<mx::E4M3>(codes[i]) * scale) << r << " " << c;
    }
  }
}

/// The tensor has more numbers than are converted at a time. It is converted there and back.
TEST(HfWeights, TensorsOfSeveralChunks) {
  const TemporaryFolder scratch;
  const std::int64_t rows = 515, columns = 1024;  // 2 chunks of 2^18, and 3 rows
  std::vector<float> numbers(static_cast<std::size_t>(rows * columns));
  for (std::size_t i = 0; i < numbers.size(); ++i)
    numbers[i] = static_cast<float>(i % 251) + static_cast<float>(i >> 12) * 256;
  for (float& number : numbers) number = static_cast<float>(BFloat16(number));
  const NamedTensor parameter{"output.weight", Tensor(numbers.data(), {rows, columns}, DType::kFloat32, Device::kCpu)};
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    write_hf_weights(
        scratch.path(), std::span(&parameter, 1),
        [&](const NamedTensor&, std::int64_t begin, std::int64_t end, const FloatSink& sink) {
          sink(std::span(numbers).subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(end - begin)));
        },
        1, {.dtype = dtype});
    std::vector<float> read;
    HfWeights(scratch.path()).read({"lm_head.weight", {rows, columns}}, [&](std::span<const float> chunk) {
      read.insert(read.end(), chunk.begin(), chunk.end());
    });
    EXPECT_TRUE(read == numbers);
  }
}

/// A multi-token prediction layer has copies that other readers of DeepSeek's files use. This reader ignores them. The
/// router's bias stays float32.
TEST(HfWeights, CopiesAndTypes) {
  const TemporaryFolder scratch;
  ModelConfig config;
  config.n_layers = 2;
  config.n_dense_layers = 1;
  config.num_mtp_modules = 1;
  const Model model(config, {.seq_len = 16});
  const std::vector<NamedTensor> tensors = tensor_names(model.parameters());
  write_hf_weights(scratch.path(), tensors,
                   [&](const NamedTensor& tensor, std::int64_t begin, std::int64_t end, const FloatSink& sink) {
                     const float number = tensor.name == "tok_embeddings.weight" ? 1.0f
                                          : tensor.name == "output.weight"       ? 2.0f
                                                                                 : 0.3f;
                     sink(std::vector<float>(static_cast<std::size_t>(end - begin), number));
                   },
                   config.n_layers, {.dtype = DType::kBFloat16});
  const HfWeights weights(scratch.path());
  const auto first = [&](const std::string& name, const std::vector<std::int64_t>& shape) {
    float number = 0.0f;
    weights.read({name, shape}, [&](std::span<const float> chunk) { number = chunk.front(); });
    return number;
  };
  EXPECT_EQ(first("model.layers.2.embed_tokens.weight", {config.vocab_size, config.dim}), 1.0f);
  EXPECT_EQ(first("model.layers.2.shared_head.head.weight", {config.vocab_size, config.dim}), 2.0f);
  EXPECT_EQ(first("model.layers.1.mlp.gate.e_score_correction_bias", {config.num_experts}), 0.3f);
  EXPECT_EQ(first("model.layers.1.mlp.gate.weight", {config.num_experts, config.dim}),
            static_cast<float>(BFloat16(0.3f)));
}

/// transformers saves such folders, whose config.json has layers that are in no file.
TEST(SavedModel, MultiTokenPredictionThatIsInNoFile) {
  const TemporaryFolder scratch;
  fs::copy(golden("groups"), scratch / "hf");
  auto json = nlohmann::json::parse(read_text_file(scratch / "hf/config.json"));
  json["num_nextn_predict_layers"] = 1;
  data::write_file(scratch / "hf/config.json", json.dump());
  EXPECT_EQ(SavedModel(scratch / "hf").config().model.num_mtp_modules, 0);
}

TEST(HfWeights, WhatTheyRefuse) {
  const TemporaryFolder scratch;
  const auto read = [&](const std::vector<std::int64_t>& shape, const char* name = "w") {
    HfWeights(scratch.path()).read({name, shape}, [](std::span<const float>) {});
  };
  expect_error([&] { read({2}); }, {"model.safetensors.index.json", "neither"});
  write_weights(scratch.path(), {{"w", "F8_E4M3", {2, 2}}}, {bytes_of(std::vector<std::uint8_t>(4))});
  expect_error([&] { read({2, 2}); }, {"w_scale_inv"});
  expect_error([&] { read({4}); }, {"[2, 2]", "[4]"});
  write_weights(scratch.path(), {{"w", "F8_E4M3", {2, 2}}, {"w_scale_inv", "F32", {2}}},
                {bytes_of(std::vector<std::uint8_t>(4)), bytes_of(std::vector<float>(2))});
  expect_error([&] { read({2, 2}); }, {"w_scale_inv", "[1, 1]"});
  write_weights(scratch.path(), {{"w", "I32", {2}}}, {bytes_of(std::vector<std::int32_t>(2))});
  expect_error([&] { read({2}); }, {"I32", "BF16"});

  const fs::path index = scratch / "model.safetensors.index.json";
  for (const auto& [text, part] : std::vector<std::pair<std::string, std::string>>{
           {"[]", "weight_map"},
           {"{\"weight_map\": {\"w\": 3}}", "no string"},
           {"{\"weight_map\": {\"w\": \"../model.safetensors\"}}", "the name of a file beside it"},
           {"{\"weight_map\": {\"w\": \"absent.safetensors\"}}", "absent.safetensors"},
           {"{\"weight_map\": {\"w\": \"model.safetensors\", \"other\": \"model.safetensors\"}}", "no tensor 'other'"},
           {"{\"weight_map\": {\"other\": \"model.safetensors\"}}", "has the tensor 'w', which"},
           {"{\"weight_map\": {\"w\": ", "not JSON"}}) {
    data::write_file(index, text);
    expect_error([&] { read({2}, "other"); }, {part});
  }
}

TEST(HfConfigJson, RoundTripsWhatItHolds) {
  HfConfig config;
  config.model = model_flavor("671B");
  config.model.num_mtp_modules = 1;
  config.model.norm_eps = 1e-6f;
  config.model.eos_id = 1;
  config.seq_len = 8192;
  config.bos_id = 0;
  config.eos_id = 1;
  const auto expect_round_trip = [&] {
    const std::string text = hf_config_json(config, DType::kBFloat16);
    const HfConfig parsed = parse_hf_config(text, "config.json");
    EXPECT_EQ(parsed.form, config.form);
    EXPECT_EQ(parsed.model.mscale, config.model.mscale);
    EXPECT_EQ(parsed.model.score_func, config.model.score_func);
    EXPECT_EQ(hf_config_json(parsed, DType::kBFloat16), text);
    return text;
  };
  EXPECT_THAT(expect_round_trip(), ::testing::HasSubstr("\"rms_norm_eps\": 1e-06"));
  config.model.mscale = 0.0f;
  EXPECT_THAT(expect_round_trip(), ::testing::HasSubstr("\"attention_factor\": 1.0"));
  config.form = HfForm::kRemoteCode;
  config.bos_id = config.eos_id = config.model.eos_id = -1;
  EXPECT_THAT(expect_round_trip(), ::testing::HasSubstr("\"eos_token_id\": null"));
  config.model = model_flavor("236B");
  config.model.num_shared_experts = 0;
  expect_round_trip();
  config.model = model_flavor("16B");
  config.form = HfForm::kDeepseekV2;
  EXPECT_THAT(expect_round_trip(), ::testing::HasSubstr("\"topk_method\": \"greedy\""));
}

TEST(HfConfigJson, SaysWhatTransformersDoesDifferently) {
  using ::testing::ElementsAre;
  using ::testing::HasSubstr;
  HfConfig config{.model = model_flavor("671B"), .seq_len = 4096};
  EXPECT_THAT(hf_differences(config), ElementsAre(HasSubstr("epsilon 1e-06")));
  config.model.norm_eps = 1e-6f;
  EXPECT_TRUE(hf_differences(config).empty());
  config.seq_len = 163840;  // 40 times the original length, as in DeepSeek-V3
  EXPECT_TRUE(hf_differences(config).empty());
  config.seq_len = 8192;
  EXPECT_THAT(hf_differences(config), ElementsAre(HasSubstr("versions before 5")));
  config.form = HfForm::kDeepseekV2;
  EXPECT_THAT(hf_differences(config), ElementsAre(HasSubstr("scale RoPE"), HasSubstr("mscale")));
  config.model.mscale = 0.0f;
  EXPECT_THAT(hf_differences(config), ElementsAre(HasSubstr("scale RoPE")));
  config.model.norm_eps = 1e-5f;
  config.form = HfForm::kRemoteCode;
  EXPECT_TRUE(hf_differences(config).empty());
}

TEST(HfConfigJson, SaysWhyAFormCannotHoldAModel) {
  using ::testing::ElementsAre;
  using ::testing::HasSubstr;
  const auto obstacles = [](const ModelConfig& model, HfForm form) {
    return hf_obstacles({.model = model, .form = form, .seq_len = 8});
  };
  for (const std::string& flavor : model_flavor_names()) {
    EXPECT_TRUE(obstacles(model_flavor(flavor), HfForm::kRemoteCode).empty());
  }
  ModelConfig softmax = model_flavor("16B"), sigmoid = model_flavor("671B");
  EXPECT_EQ(plain_hf_form(softmax), HfForm::kDeepseekV2);
  EXPECT_EQ(plain_hf_form(sigmoid), HfForm::kDeepseekV3);
  EXPECT_TRUE(obstacles(softmax, HfForm::kDeepseekV2).empty());
  EXPECT_TRUE(obstacles(sigmoid, HfForm::kDeepseekV3).empty());
  EXPECT_THAT(obstacles(softmax, HfForm::kDeepseekV3), ElementsAre(HasSubstr("sigmoid")));
  EXPECT_THAT(obstacles(sigmoid, HfForm::kDeepseekV2),
              ElementsAre(HasSubstr("softmax"), HasSubstr("n_expert_groups"), HasSubstr("route_norm")));
  EXPECT_THAT(obstacles(model_flavor("236B"), HfForm::kDeepseekV2), ElementsAre(HasSubstr("n_expert_groups")));
  expect_error([] { hf_config_json({.model = model_flavor("236B"), .form = HfForm::kDeepseekV2}, DType::kFloat32); },
               {"DeepseekV2ForCausalLM", "n_expert_groups"});
  softmax.n_expert_groups = softmax.n_limited_groups = 1;
  EXPECT_TRUE(obstacles(softmax, HfForm::kDeepseekV2).empty());
  softmax.n_heads = 15;
  softmax.num_shared_experts = 0;
  EXPECT_THAT(obstacles(softmax, HfForm::kDeepseekV2), ElementsAre(HasSubstr("n_heads"), HasSubstr("shared experts")));
  sigmoid.n_expert_groups = sigmoid.n_limited_groups = 256;
  EXPECT_THAT(obstacles(sigmoid, HfForm::kDeepseekV3), ElementsAre(HasSubstr("two experts")));
  softmax.n_dense_layers = softmax.n_layers;  // routers then do not matter
  EXPECT_EQ(plain_hf_form(softmax), HfForm::kDeepseekV3);
  EXPECT_TRUE(obstacles(softmax, HfForm::kDeepseekV3).empty());
}

/// The published configuration of DeepSeek-V2-Lite, without the keys that nothing here reads.
TEST(HfConfigJson, ReadsDeepSeekV2Lite) {
  const nlohmann::json published = {{"architectures", {"DeepseekV2ForCausalLM"}},
                                    {"model_type", "deepseek_v2"},
                                    {"attention_bias", false},
                                    {"bos_token_id", 100000},
                                    {"eos_token_id", 100001},
                                    {"first_k_dense_replace", 1},
                                    {"hidden_act", "silu"},
                                    {"hidden_size", 2048},
                                    {"intermediate_size", 10944},
                                    {"kv_lora_rank", 512},
                                    {"max_position_embeddings", 163840},
                                    {"moe_intermediate_size", 1408},
                                    {"moe_layer_freq", 1},
                                    {"n_group", 1},
                                    {"n_routed_experts", 64},
                                    {"n_shared_experts", 2},
                                    {"norm_topk_prob", false},
                                    {"num_attention_heads", 16},
                                    {"num_experts_per_tok", 6},
                                    {"num_hidden_layers", 27},
                                    {"num_key_value_heads", 16},
                                    {"q_lora_rank", nullptr},
                                    {"qk_nope_head_dim", 128},
                                    {"qk_rope_head_dim", 64},
                                    {"rms_norm_eps", 1e-6},
                                    {"rope_scaling",
                                     {{"beta_fast", 32},
                                      {"beta_slow", 1},
                                      {"factor", 40},
                                      {"mscale", 0.707},
                                      {"mscale_all_dim", 0.707},
                                      {"original_max_position_embeddings", 4096},
                                      {"type", "yarn"}}},
                                    {"rope_theta", 10000},
                                    {"routed_scaling_factor", 1.0},
                                    {"scoring_func", "softmax"},
                                    {"tie_word_embeddings", false},
                                    {"topk_group", 1},
                                    {"topk_method", "greedy"},
                                    {"v_head_dim", 128},
                                    {"vocab_size", 102400}};
  const HfConfig config = parse_hf_config(published.dump(), "config.json");
  EXPECT_EQ(config.form, HfForm::kDeepseekV2);
  ModelConfig expected = model_flavor("16B");
  EXPECT_EQ(config.model.num_experts, expected.num_experts);
  EXPECT_EQ(config.model.top_k, expected.top_k);
  EXPECT_EQ(config.model.score_func, ScoreFunction::kSoftmax);
  EXPECT_FALSE(config.model.route_norm);
  EXPECT_EQ(config.model.n_expert_groups, 0);
  EXPECT_EQ(config.model.mscale, 0.707f);
  const auto refused = [&](const char* key, const nlohmann::json& value, const std::vector<std::string>& parts) {
    nlohmann::json json = published;
    json[key] = value;
    expect_error([&] { parse_hf_config(json.dump(), "config.json"); }, parts);
  };
  // The method of DeepSeek-V2.
  refused("topk_method", "group_limited_greedy", {"topk_method", "group_limited_greedy", "greedy"});
  refused("norm_topk_prob", true, {"norm_topk_prob", "true", "false"});
  refused("scoring_func", "sigmoid", {"scoring_func", "sigmoid", "softmax"});
  refused("mlp_bias", true, {"mlp_bias"});
  refused("model_type", "kimi_k2", {"kimi_k2", "deepseek_v3", "deepseek_v2", "remote-code"});
  refused("model_type", nullptr, {"model_type", "missing"});
}

TEST(HfConfigJson, ReadsBothFormsOfRope) {
  auto json = nlohmann::json::parse(hf_config_json({.model = model_flavor("671B"), .seq_len = 8192}, DType::kFloat32));
  json["rope_scaling"] = nullptr;
  json["rope_theta"] = nullptr;
  json["rope_parameters"] = {{"rope_type", "yarn"}, {"rope_theta", 50000.0},
                             {"factor", 8.0},       {"original_max_position_embeddings", 2048},
                             {"mscale", 0.5},       {"mscale_all_dim", 0.5}};
  const ModelConfig model = parse_hf_config(json.dump(), "config.json").model;
  EXPECT_EQ(model.rope_theta, 50000.0f);
  EXPECT_EQ(model.rope_factor, 8.0f);
  EXPECT_EQ(model.original_seq_len, 2048);
  EXPECT_EQ(model.mscale, 0.5f);
  json["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 50000.0}};
  EXPECT_EQ(parse_hf_config(json.dump(), "config.json").model.original_seq_len, 8192);  // RoPE is never scaled
}

TEST(HfConfigJson, MayLeaveOutWhatHasADefault) {
  auto json = nlohmann::json::parse(hf_config_json({.model = model_flavor("671B"), .seq_len = 8192}, DType::kFloat32));
  for (const char* key : {"hidden_act", "attention_bias", "tie_word_embeddings", "moe_layer_freq", "topk_method",
                          "rope_interleave", "scoring_func", "num_key_value_heads", "num_nextn_predict_layers"}) {
    json.erase(key);
  }
  const HfConfig config = parse_hf_config(json.dump(), "config.json");
  EXPECT_EQ(config.model.n_heads, 128);
  EXPECT_EQ(config.model.score_func, ScoreFunction::kSigmoid);
}

TEST(HfConfigJson, WhatItRefuses) {
  const auto valid =
      nlohmann::json::parse(hf_config_json({.model = model_flavor("671B"), .seq_len = 8192}, DType::kFloat32));
  const auto refused = [&](const char* key, const nlohmann::json& value, const std::vector<std::string>& parts) {
    nlohmann::json json = valid;
    json[key] = value;
    std::vector<std::string> all = parts;
    all.emplace_back("config.json");
    expect_error([&] { parse_hf_config(json.dump(), "config.json"); }, all);
  };
  refused("model_type", "llama", {"model_type", "llama", "deepseek_v3"});
  refused("hidden_size", nullptr, {"hidden_size", "missing"});
  refused("hidden_size", -5, {"hidden_size", "-5"});
  refused("hidden_size", 1e30, {"hidden_size"});
  refused("hidden_size", "big", {"hidden_size", "big"});
  refused("attention_bias", true, {"attention_bias"});
  refused("tie_word_embeddings", true, {"tie_word_embeddings"});
  refused("hidden_act", "gelu", {"hidden_act", "gelu"});
  refused("num_experts_per_tok", 300, {"top_k"});
  refused("num_key_value_heads", 8, {"num_key_value_heads"});
  refused("rope_scaling", {{"type", "linear"}}, {"linear"});
  refused("scoring_func", "tanh", {"tanh"});
  refused("rope_theta", 0.0, {"rope_theta"});
  refused("rms_norm_eps", -1.0, {"norm_eps"});
  refused("max_position_embeddings", 0, {"max_position_embeddings"});
  refused("bos_token_id", 1'000'000'000, {"bos_token_id", "1000000000", "outside the vocabulary"});
  for (const char* key : {"n_group", "topk_group", "routed_scaling_factor", "n_shared_experts", "q_lora_rank"}) {
    nlohmann::json json = valid;
    json.erase(key);  // transformers has a default, but none that means "none"
    expect_error([&] { parse_hf_config(json.dump(), "config.json"); }, {"config.json", key, "missing"});
  }
  const nlohmann::json& yarn = valid["rope_scaling"];
  const auto refused_yarn = [&](const char* key, const nlohmann::json& value, const std::string& part) {
    nlohmann::json changed = yarn;
    changed[key] = value;
    refused("rope_scaling", changed, {part});
  };
  refused_yarn("mscale", 0.5, "mscale");
  refused_yarn("mscale_all_dim", nullptr, "mscale_all_dim");
  refused_yarn("factor", nullptr, "factor");
  refused_yarn("factor", 1e300, "rope_factor");
  refused_yarn("truncate", false, "truncate");
  refused_yarn("attention_factor", 1.5, "attention_factor");
  nlohmann::json without_mscale = yarn;
  without_mscale["mscale"] = without_mscale["mscale_all_dim"] = 0.0;  // transformers then scales cosines and sines
  refused("rope_scaling", without_mscale, {"mscale", "attention_factor"});
  refused_yarn("original_max_position_embeddings", 8192, "YaRN");
  expect_error([] { parse_hf_config("{", "config.json"); }, {"config.json", "JSON"});
  expect_error([] { parse_hf_config("[]", "config.json"); }, {"config.json", "object"});
  HfConfig none{.model = model_flavor("16B"), .seq_len = 8};
  none.model.num_shared_experts = 0;
  expect_error([&] { hf_config_json(none, DType::kFloat32); }, {"shared experts"});
}

TEST(SavedModel, NamesMissingAndUnexpectedTensors) {
  const SavedModel saved(golden("groups"));
  ModelConfig other = saved.config().model;
  const auto load_into = [&] {
    Model model(other, {.compute = DType::kFloat32, .seq_len = 64});
    model.parameters().allocate_weights(DType::kFloat32);
    saved.load(model.parameters(), other);
  };
  load_into();
  other.n_layers = 4;
  expect_error(load_into, {"missing", "model.layers.3."});
  other.n_layers = 2;  // layer 2 is not multi-token prediction, which may be left out
  expect_error(load_into, {"not expected", "model.layers.2."});
  other.n_layers = 3;
  other.q_lora_rank = 0;
  expect_error(load_into, {"q_proj", "not expected", "q_a_proj"});
  other.q_lora_rank = 24;
  expect_error(load_into, {"q_a_proj", "[20, 48]", "[24, 48]"});
}

}  // namespace
}  // namespace tessera
