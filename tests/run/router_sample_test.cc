#include "run/router_sample.h"

#include <gtest/gtest.h>

#include "model/model.h"
#include "tests/data/support.h"

namespace tessera {
namespace {

constexpr std::int64_t kNumTokens = 40;

/// Returns the routing differences of the golden model "v2" with these groups. It has 8 experts and top-k 3 in layers 1
/// to 3. With `with_bias`, the experts 5 to 7 of layer 2 have a bias of 100.
std::vector<RoutingDifference> differences(std::int64_t num_groups, std::int64_t num_limited, bool with_bias) {
  const data::TemporaryFolder scratch;
  const SavedModel golden(std::filesystem::path(TESSERA_TEST_DATA) / "golden/hf/v2");
  HfConfig config = golden.config();
  config.form = HfForm::kRemoteCode;
  config.model.n_expert_groups = num_groups;
  config.model.n_limited_groups = num_limited;
  const auto source = [&](const NamedTensor& tensor, std::int64_t begin, std::int64_t end, const FloatSink& sink) {
    std::vector<float> numbers;
    golden.read(tensor.name, tensor.tensor.shape(),
                [&](std::span<const float> chunk) { numbers.insert(numbers.end(), chunk.begin(), chunk.end()); });
    if (with_bias && tensor.name == "layers.2.moe.expert_bias") numbers = {0, 0, 0, 0, 0, 100, 100, 100};
    sink({numbers.begin() + begin, numbers.begin() + end});
  };
  write_hf_weights(scratch.path(), tensor_names(Model(config.model, {.seq_len = 1}).parameters()), source,
                   config.model.n_layers, {.dtype = DType::kFloat32});
  data::write_file(scratch / kHfConfigName, hf_config_json(config, DType::kFloat32));
  std::vector<std::int32_t> tokens;
  for (std::int32_t i = 0; i < kNumTokens; ++i) tokens.push_back(i * 7 % 256);
  return compare_with_v2_router(SavedModel(scratch.path()), tokens);
}

TEST(RouterSample, OnlyALayerWithABiasDiffers) {
  for (const bool with_bias : {false, true}) {
    const std::vector<RoutingDifference> layers = differences(0, 0, with_bias);
    ASSERT_EQ(layers.size(), 3u);
    for (std::size_t i = 0; i < layers.size(); ++i) {
      EXPECT_EQ(layers[i].layer, fmt::format("layers.{}.moe", i + 1));
      EXPECT_EQ(layers[i].num_selections, 3 * kNumTokens);
      const bool differs = with_bias && i == 1;
      EXPECT_EQ(layers[i].num_different > 0, differs) << layers[i].num_different;
    }
    // Even without the bias, some tokens go to one of these three experts.
    EXPECT_LT(layers[1].num_different, 3 * kNumTokens);
  }
}

TEST(RouterSample, GroupsThatAreLimitedDiffer) {
  for (const auto& layer : differences(4, 4, false)) EXPECT_EQ(layer.num_different, 0);
  std::int64_t num_different = 0;
  for (const auto& layer : differences(4, 2, false)) num_different += layer.num_different;
  EXPECT_GT(num_different, 0);
}

}  // namespace
}  // namespace tessera
