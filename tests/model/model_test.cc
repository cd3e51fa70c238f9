#include "model/model.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>

namespace tessera {
namespace {

TEST(Model, WhatParametersStartAs) {
  ModelConfig config;
  config.n_layers = 2;
  config.n_dense_layers = 1;
  config.q_lora_rank = 8;
  config.num_mtp_modules = 1;
  const Model model(config, {.seq_len = 16});
  ModelConfig full_rank = config;
  full_rank.q_lora_rank = 0;
  const Model other(full_rank, {.seq_len = 16});

  // Standard deviations. kByDepth stands for 0.02 divided by the root of 2 (L + 1). The block of the MTP module is
  // layer 2.
  constexpr float kShallow = 0.02f, kByDepth = -1.0f, kOnes = 0.0f;
  const std::map<std::string, std::pair<float, std::optional<float>>> in_block = {
      {"attention_norm.weight", {kOnes, {}}},
      {"attention.wq.weight", {kShallow, {}}},
      {"attention.wq_a.weight", {kShallow, {}}},
      {"attention.q_norm.weight", {kOnes, {}}},
      {"attention.wq_b.weight", {kShallow, {}}},
      {"attention.wkv_a.weight", {kShallow, {}}},
      {"attention.kv_norm.weight", {kOnes, {}}},
      {"attention.wkv_b.weight", {kShallow, {}}},
      {"attention.wo.weight", {kByDepth, {}}},
      {"ffn_norm.weight", {kOnes, {}}},
      {"feed_forward.w13.weight", {kShallow, kByDepth}},
      {"feed_forward.w2.weight", {kByDepth, {}}},
      {"moe.router.gate.weight", {kByDepth, {}}},
      {"moe.experts.w13", {kShallow, kByDepth}},
      {"moe.experts.w2", {kByDepth, {}}},
      {"moe.shared_experts.w13.weight", {kShallow, kByDepth}},
      {"moe.shared_experts.w2.weight", {kByDepth, {}}},
  };
  const std::map<std::string, int> blocks = {{"layers.0.", 0}, {"layers.1.", 1}, {"mtp.0.block.", 2}};
  const float of_output = 1.0f / std::sqrt(static_cast<float>(config.dim));
  std::map<std::string, std::pair<Init, std::optional<Init>>> expected = {
      {"tok_embeddings.weight", {{.std = 1.0f, .bound = 0.0f}, {}}},
      {"norm.weight", {{}, {}}},
      {"output.weight", {{.std = of_output, .bound = 3.0f * of_output}, {}}},
      {"mtp.0.embedding_norm.weight", {{}, {}}},
      {"mtp.0.hidden_norm.weight", {{}, {}}},
      {"mtp.0.norm.weight", {{}, {}}},
      {"mtp.0.eh_proj.weight", {{.std = 0.02f, .bound = 2.0f}, {}}},
  };
  for (const auto& [prefix, layer] : blocks) {
    const auto init_of = [layer](float deviation) -> Init {
      if (deviation == kOnes) return {};
      const double by_depth = 0.02 / std::sqrt(2.0 * (layer + 1));
      return {.std = deviation == kByDepth ? static_cast<float>(by_depth) : deviation, .bound = 2.0f};
    };
    for (const auto& [name, deviations] : in_block) {
      const auto& [first, up] = deviations;
      expected[prefix + name] = {init_of(first), up ? std::optional(init_of(*up)) : std::nullopt};
    }
  }
  std::size_t seen = 0;
  for (const Model* one : {&model, &other}) {
    for (ParamId id = 0; id < one->parameters().size(); ++id) {
      const ParamSpec& spec = one->parameters().spec(id);
      ASSERT_TRUE(expected.contains(spec.name)) << spec.name;
      const auto& [init, up] = expected[spec.name];
      EXPECT_FLOAT_EQ(spec.init.std, init.std) << spec.name;
      EXPECT_EQ(spec.init.bound, init.bound) << spec.name;
      ASSERT_EQ(spec.init_up.has_value(), up.has_value()) << spec.name;
      if (up) {
        EXPECT_FLOAT_EQ(spec.init_up->std, up->std) << spec.name;
        EXPECT_EQ(spec.init_up->bound, up->bound) << spec.name;
      }
      ++seen;
    }
  }
  EXPECT_GT(seen, 50u);
}

}  // namespace
}  // namespace tessera
