#include "parallel/pipeline_stages.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>

#include "tests/expect_error.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using Sizes = std::vector<std::int64_t>;

/// Returns the layers per stage. Expects consecutive layers, the embedding in the first stage and the head in the last.
Sizes sizes_of(const std::vector<StageModules>& stages, std::int64_t num_layers) {
  Sizes sizes;
  std::int64_t layer = 0;
  for (std::size_t s = 0; s < stages.size(); ++s) {
    EXPECT_EQ(stages[s].embedding, s == 0);
    EXPECT_EQ(stages[s].head, s + 1 == stages.size());
    EXPECT_EQ(stages[s].first_layer, layer);
    sizes.push_back(stages[s].num_layers);
    layer += stages[s].num_layers;
  }
  EXPECT_EQ(layer, num_layers);
  return sizes;
}

Sizes by_cost(const std::vector<double>& costs, double embedding, double head, int num_stages) {
  return sizes_of(cut_by_cost(costs, embedding, head, num_stages), static_cast<std::int64_t>(costs.size()));
}

Sizes by_layers(std::int64_t num_layers, std::int64_t layers_per_stage, std::int64_t first_less = 1,
                std::int64_t last_less = 1) {
  return sizes_of(cut_by_layers_per_stage(num_layers, layers_per_stage, first_less, last_less), num_layers);
}

/// Returns one cost per layer: `num_dense` layers cost `dense`, and the sparse layers after them cost 1.
std::vector<double> model(std::size_t num_dense, double dense, std::size_t num_layers) {
  std::vector<double> costs(num_layers, 1.0);
  std::fill_n(costs.begin(), num_dense, dense);
  return costs;
}

TEST(CutByCost, EvenWhereItCanBeTheFirstStagesOneMore) {
  EXPECT_THAT(by_cost(model(0, 0, 12), 0, 0, 4), ElementsAre(3, 3, 3, 3));
  EXPECT_THAT(by_cost(model(0, 0, 10), 0, 0, 4), ElementsAre(3, 3, 2, 2));
  EXPECT_THAT(by_cost(model(0, 0, 9), 0, 0, 4), ElementsAre(3, 2, 2, 2));
  EXPECT_THAT(by_cost(model(0, 0, 5), 0, 0, 1), ElementsAre(5));
  EXPECT_THAT(by_cost(model(0, 0, 5), 0, 0, 5), ElementsAre(1, 1, 1, 1, 1));
}

TEST(CutByCost, EmbeddingAndHeadAndDearLayersWeigh) {
  EXPECT_THAT(by_cost(model(0, 0, 10), 1, 1, 4), ElementsAre(2, 3, 3, 2));
  EXPECT_THAT(by_cost(model(0, 0, 10), 0, 3, 3), ElementsAre(5, 4, 1));
  EXPECT_THAT(by_cost({4, 1, 1, 1, 1}, 0, 0, 2), ElementsAre(1, 4));
  EXPECT_THAT(by_cost({1, 1, 1, 1, 4}, 0, 0, 2), ElementsAre(4, 1));
  // With one layer, the head's stage is as cheap as it can be, whatever the other stages have. So the others are even.
  EXPECT_THAT(by_cost(model(0, 0, 7), 0, 100, 4), ElementsAre(2, 2, 2, 1));
  EXPECT_THAT(by_cost(model(0, 0, 7), 100, 0, 4), ElementsAre(1, 2, 2, 2));
}

TEST(CutByCost, TheUnitDoesNotMatter) {
  for (const double unit : {0.1, 1e12 / 3, 1.7e-9}) {
    const std::vector<double> costs(10, unit);
    EXPECT_THAT(by_cost(costs, 0, 0, 4), ElementsAre(3, 3, 2, 2)) << unit;
    EXPECT_THAT(by_cost(costs, unit, unit, 4), ElementsAre(2, 3, 3, 2)) << unit;
  }
}

/// Cuts the model sizes. A dense layer, an embedding and a head have about their real costs, in units of a sparse
/// layer.
TEST(CutByCost, ModelSizes) {
  EXPECT_THAT(by_cost(model(1, 0.8, 6), 0, 1.5, 2), ElementsAre(4, 2));                     // debugmodel
  EXPECT_THAT(by_cost(model(1, 1.0, 27), 0, 3.0, 4), ElementsAre(8, 8, 7, 4));              // 16B
  EXPECT_THAT(by_cost(model(1, 1.0, 60), 0, 1.6, 8), ElementsAre(8, 8, 8, 8, 8, 7, 7, 6));  // 236B
  EXPECT_THAT(by_cost(model(3, 1.0, 61), 0, 1.0, 16), ElementsAre(4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 3, 2));
}

/// Compares the cut with all possible cuts.
TEST(CutByCost, NoOtherCutIsBetter) {
  std::mt19937 random(7);
  for (int round = 0; round < 300; ++round) {
    const std::size_t num_layers = 1 + random() % 8;
    const int num_stages = 1 + static_cast<int>(random() % num_layers);
    std::vector<double> costs(num_layers);
    const auto below = [&](unsigned limit) { return static_cast<double>(random() % limit); };
    for (double& cost : costs) cost = below(6);
    const double embedding = below(4), head = below(9);
    const auto dearest = [&](const Sizes& sizes) {
      double result = 0.0;
      auto layer = costs.begin();
      for (std::size_t s = 0; s < sizes.size(); ++s) {
        const double cost = std::accumulate(layer, layer + sizes[s], 0.0);
        result = std::max(result, cost + (s == 0 ? embedding : 0.0) + (s + 1 == sizes.size() ? head : 0.0));
        layer += sizes[s];
      }
      return result;
    };
    // A cut is a choice of the layers that begin a stage. The first layer always begins one.
    double best = std::numeric_limits<double>::infinity();
    for (unsigned choice = 0; choice < 1u << (num_layers - 1); ++choice) {
      Sizes sizes = {1};
      for (std::size_t layer = 1; layer < num_layers; ++layer) {
        if ((choice >> (layer - 1) & 1) != 0) {
          sizes.push_back(1);
        } else {
          ++sizes.back();
        }
      }
      if (sizes.size() == static_cast<std::size_t>(num_stages)) best = std::min(best, dearest(sizes));
    }
    EXPECT_EQ(dearest(by_cost(costs, embedding, head, num_stages)), best);
  }
}

TEST(CutByCost, FewerLayersThanStages) {
  expect_error([] { cut_by_cost(std::vector<double>(3, 1.0), 0, 0, 4); },
               {"pipeline_parallel_degree", "pipeline_parallel_schedule", "4 stages", "n_layers is 3"});
}

// TorchTitan's generate_llm_fqn_per_model_part gives these cuts for the stages that its pipeline_llm counts.
TEST(CutByLayersPerStage, AsTorchTitanCuts) {
  EXPECT_THAT(by_layers(6, 4), ElementsAre(3, 3));
  EXPECT_THAT(by_layers(6, 2), ElementsAre(1, 2, 2, 1));
  EXPECT_THAT(by_layers(27, 8), ElementsAre(7, 7, 7, 6));              // 29 counted: 8, 7, 7, 7
  EXPECT_THAT(by_layers(27, 4), ElementsAre(3, 4, 4, 4, 4, 3, 3, 2));  // 29 counted: five of 4, three of 3
  EXPECT_THAT(by_layers(60, 31), ElementsAre(30, 30));
  EXPECT_THAT(by_layers(61, 16), ElementsAre(15, 16, 16, 14));
  EXPECT_THAT(by_layers(32, 5), ElementsAre(4, 5, 5, 5, 5, 5, 3));
  EXPECT_THAT(by_layers(8, 2, 0, 0), ElementsAre(2, 2, 2, 2));
  EXPECT_THAT(by_layers(10, 4, 2, 0), ElementsAre(2, 4, 4));
  EXPECT_THAT(by_layers(3, 4, 2, 2), ElementsAre(2, 1));
  EXPECT_THAT(by_layers(5, 9), ElementsAre(5));
  EXPECT_THAT(by_layers(4, 1), ElementsAre(0, 1, 1, 1, 1, 0));  // embedding and head have separate stages
}

TEST(CutByLayersPerStage, MoreLessThanAStageHolds) {
  expect_error([] { cut_by_layers_per_stage(8, 2, 3, 1); },
               {"first_stage_less_layers is 3", "layers_per_stage = 2", "8 layers", "6 stages", "hold 2"});
  expect_error([] { cut_by_layers_per_stage(8, 2, 0, 4); }, {"last_stage_less_layers is 4", "hold 2"});
}

TEST(ModuleLists, DescribeStages) {
  const std::vector<std::vector<std::string>> lists = {
      {"tok_embeddings"}, {"layers.0", "layers.1"}, {"layers.2", "norm", "output"}};
  EXPECT_THAT(stages_of_module_lists(lists, 3),
              ElementsAre(StageModules{.embedding = true}, StageModules{.first_layer = 0, .num_layers = 2},
                          StageModules{.first_layer = 2, .num_layers = 1, .head = true}));
  const std::vector<std::vector<std::string>> one = {{"tok_embeddings", "layers.0", "norm", "output"}};
  EXPECT_THAT(stages_of_module_lists(one, 1),
              ElementsAre(StageModules{.embedding = true, .num_layers = 1, .head = true}));
  const std::vector<std::vector<std::string>> head_alone = {{"tok_embeddings", "layers.0"}, {"norm", "output"}};
  EXPECT_THAT(stages_of_module_lists(head_alone, 1), ElementsAre(StageModules{.embedding = true, .num_layers = 1},
                                                                 StageModules{.first_layer = 1, .head = true}));
}

TEST(ModuleLists, WhatIsNoCut) {
  const auto fails = [](const std::vector<std::vector<std::string>>& lists, const std::vector<std::string>& parts) {
    std::vector<std::string> all = parts;
    all.emplace_back("parallelism.module_fqns_per_model_part");
    expect_error([&] { stages_of_module_lists(lists, 3); }, all);
  };
  const std::vector<std::string> last = {"layers.2", "norm", "output"};
  fails({}, {"tok_embeddings is in no stage"});
  fails({{"tok_embeddings", "layers.0"}, {}, {"layers.1"}}, {"stage 1 has no modules"});
  for (const char* name : {"layers.3", "layers.-1", "layers.01", "layers.1x", "layers.", "lm_head", "",
                           "layers.99999999999999999999", "layers.0.attention"}) {
    fails({{"tok_embeddings", std::string(name)}, last},
          {fmt::format("'{}'", name), "layers.0 to layers.2", "3 layers"});
  }
  fails({{"layers.0", "tok_embeddings"}, {"layers.1"}, last}, {"stage 0", "layers.0", "tok_embeddings is expected"});
  fails({{"tok_embeddings", "layers.0"}, last}, {"stage 1", "layers.2", "layers.1 is expected"});
  fails({{"tok_embeddings", "layers.0"}, {"layers.0", "layers.1"}, last}, {"stage 1", "layers.0", "listed once"});
  fails({{"tok_embeddings", "layers.1", "layers.0"}, last}, {"layers.1", "layers.0 is expected"});
  fails({{"tok_embeddings", "layers.0", "layers.1", "layers.2", "norm"}, {"output"}},
        {"stage 1", "output without norm"});
  fails({{"tok_embeddings", "layers.0", "layers.1", "layers.2", "norm"}}, {"output is in no stage"});
  fails({{"tok_embeddings", "layers.0", "layers.1", "layers.2", "output", "norm"}}, {"output", "norm is expected"});
  fails({{"tok_embeddings", "layers.0", "layers.1"}, last, {"output"}}, {"stage 2", "nothing more is expected"});
}

}  // namespace
}  // namespace tessera
