// Checks what tests/walks/attention.patch adds: layers without RoPE, by central differences of a whole model's loss.
#include <gtest/gtest.h>

#include <cmath>

#include "model/rope_table.h"
#include "run/state/hf_config.h"
#include "step/training_step.h"
#include "tests/ops/harness.h"
#include "tests/step/small_model.h"
#include "tests/walks/config_page.h"

namespace tessera {
namespace {

constexpr const char* kKey = "--model.args.rope_layers=three_of_four";
constexpr std::int64_t kSeqLen = 24;
constexpr double kGain = 6.0;  // of attention's weights, which start too small for positions to matter

JobConfig config_of(std::vector<std::string> overrides) {
  // A router would choose other experts for moved weights, so all layers are dense.
  for (const char* fixed :
       {"--model.args.n_dense_layers=4", "--optimizer.lr=0", "--optimizer.weight_decay=0", "--training.max_norm=inf",
        "--training.seq_len=24", "--training.local_batch_size=2", "--training.steps=10",
        "--training.mixed_precision_param=float32", "--training.num_threads=1"}) {
    overrides.insert(overrides.begin(), fixed);
  }
  JobConfig config = parse_job_config(kSmallModel, overrides);
  config.validate();
  return config;
}

/// A model whose steps change no weights, with one batch.
class FixedModel {
 public:
  explicit FixedModel(const JobConfig& config) : config_(config), step_(config_) {
    step_.allocate();
    Parameters& parameters = step_.model().parameters();
    for (ParamId id = 0; id < parameters.size(); ++id) {
      if (parameters.spec(id).name.find("attention.w") == std::string::npos) continue;
      std::vector<float> larger;
      for (const double w : doubles(parameters.master_shard(id))) larger.push_back(static_cast<float>(kGain * w));
      parameters.set(id, 0, larger);
    }
    step_.refresh_weights();
    std::vector<std::int32_t> tokens(2 * (kSeqLen + 1));
    for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<std::int32_t>(i * i * 5 % 83 + 2);
    batches_.push_back(step_.make_batch());
    batches_.back().fill(tokens);
  }

  /// Computes loss and gradients.
  double loss() { return step_.run(1, batches_).total_loss; }

  /// Compares the gradient of a parameter with a central difference in its own direction.
  void expect_gradient(const std::string& name) {
    Parameters& parameters = step_.model().parameters();
    const ParamId id = find(name);
    loss();
    const Doubles w = doubles(parameters.master_shard(id)), g = doubles(parameters.gradient_shard(id));
    const double norm = std::sqrt(dot(g, g));
    ASSERT_GT(norm, 0.0) << name;
    const auto loss_at = [&](double distance) {
      std::vector<float> moved(w.size());
      for (std::size_t i = 0; i < w.size(); ++i) moved[i] = static_cast<float>(w[i] + distance * g[i] / norm);
      parameters.set(id, 0, moved);
      step_.refresh_weights();
      return loss();
    };
    const double distance = 0.01 * std::sqrt(dot(w, w));
    const double slope = (loss_at(distance) - loss_at(-distance)) / (2.0 * distance);
    loss_at(0.0);
    EXPECT_NEAR(slope, norm, 0.01 * norm) << name;
  }

 private:
  ParamId find(const std::string& name) {
    const Parameters& parameters = step_.model().parameters();
    for (ParamId id = 0; id < parameters.size(); ++id) {
      if (parameters.spec(id).name == name) return id;
    }
    ADD_FAILURE() << name;
    return 0;
  }

  JobConfig config_;
  TrainingStep step_;
  std::vector<Batch> batches_;
};

void expect_gradients(const std::vector<std::string>& overrides, const std::vector<std::string>& weights) {
  FixedModel model(config_of(overrides));
  for (const char* layer : {"layers.0.", "layers.3."}) {
    for (const std::string& weight : weights) model.expect_gradient(layer + ("attention." + weight + ".weight"));
  }
}

TEST(LayersWithoutRope, GradientsAreCentralDifferences) {
  expect_gradients({kKey}, {"wq", "wkv_a", "wkv_b", "wo"});
  expect_gradients({kKey, "--activation_checkpoint.mode=selective", "--model.args.q_lora_rank=16"}, {"wq_b", "wkv_a"});
}

TEST(LayersWithoutRope, OnlyEveryFourthLayerDiffers) {
  const std::string three = "--model.args.n_layers=3", dense = "--model.args.n_dense_layers=3";
  EXPECT_EQ(FixedModel(config_of({kKey, three, dense})).loss(), FixedModel(config_of({three, dense})).loss());
  EXPECT_NE(FixedModel(config_of({kKey})).loss(), FixedModel(config_of({})).loss());
}

TEST(LayersWithoutRope, QueriesAndKeysStayAsTheyAre) {
  const ModelConfig config = config_of({kKey, "--model.args.original_seq_len=8"}).model.args;
  const RopeTable table(config, kSeqLen);
  Arena arena(std::size_t{1} << 20);
  const Context op{.arena = &arena};
  const Tensor x = arena.allocate({4, 3 * config.qk_rope_head_dim}, DType::kFloat32);
  const Tensor positions = arena.allocate({4}, DType::kInt32);
  for (std::int64_t i = 0; i < x.num_elements(); ++i) x.data<float>()[i] = static_cast<float>(i + 1);
  for (int i = 0; i < 4; ++i) positions.data<std::int32_t>()[i] = 2 * i + 1;
  const auto turned = [&](std::int64_t layer, RopeDirection direction) {
    const Tensor y = arena.allocate(x.shape(), x.dtype());
    LayerRope(config, layer).turn(op, table, x, 3, positions, direction, y);
    return doubles(y);
  };
  for (const RopeDirection direction : {RopeDirection::kForward, RopeDirection::kBackward}) {
    for (const std::int64_t layer : {3, 7}) EXPECT_EQ(turned(layer, direction), doubles(x));
    for (const std::int64_t layer : {0, 1, 2, 4}) EXPECT_NE(turned(layer, direction), doubles(x));
  }
  // YaRN is a part of RoPE.
  const float plain = 1.0f / std::sqrt(static_cast<float>(config.qk_head_dim()));
  EXPECT_FLOAT_EQ(LayerRope(config, 3).softmax_scale(config, table), plain);
  EXPECT_GT(LayerRope(config, 0).softmax_scale(config, table), 1.01f * plain);
}

/// No class of Hugging Face's computes such a model, the one of checkpoint/transformers included.
TEST(LayersWithoutRope, AreAnObstacleToHuggingFace) {
  for (const HfForm form : {HfForm::kDeepseekV3, HfForm::kRemoteCode}) {
    HfConfig config;
    config.form = form;
    config.model = config_of({"--model.args.score_func=sigmoid", "--model.args.n_dense_layers=1"}).model.args;
    EXPECT_TRUE(hf_obstacles(config).empty());
    config.model.rope_layers = RopeLayers::kThreeOfFour;
    EXPECT_EQ(hf_obstacles(config).size(), 1u);
  }
}

TEST(LayersWithoutRope, HasItsRowsOnTheConfigurationsPage) {
  JobConfig config;
  expect_section_of_config_page(config_table(config), "model.args.");
}

}  // namespace
}  // namespace tessera
