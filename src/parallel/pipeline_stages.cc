#include "parallel/pipeline_stages.h"

#include <algorithm>
#include <charconv>
#include <limits>
#include <string_view>

#include "base/error.h"

namespace tessera {

namespace {

/// Returns the cut in which stage s has layers_of_stage[s] layers.
std::vector<StageModules> stages_of_sizes(std::span<const std::int64_t> layers_of_stage) {
  std::vector<StageModules> stages(layers_of_stage.size());
  stages.front().embedding = true;
  stages.back().head = true;
  std::int64_t layer = 0;
  for (std::size_t s = 0; s < stages.size(); ++s) {
    stages[s].first_layer = layer;
    stages[s].num_layers = layers_of_stage[s];
    layer += layers_of_stage[s];
  }
  return stages;
}

}  // namespace

std::vector<StageModules> cut_by_cost(std::span<const double> layer_costs, double embedding_cost, double head_cost,
                                      int num_stages) {
  TESSERA_CHECK(num_stages >= 1, "{}", num_stages);
  const std::size_t num_layers = layer_costs.size(), count = static_cast<std::size_t>(num_stages);
  require(num_layers >= count,
          "parallelism.pipeline_parallel_degree and pipeline_parallel_schedule make {} stages, but model.args.n_layers "
          "is {}; expected at most one stage per layer",
          num_stages, num_layers);
  // The best way to cut the layers from `first` on into the last `stages` stages. `value` is the least value of a cut;
  // combine() computes it from a stage's cost and the value of the stages after it. `num_layers` is the number of
  // layers in the first of these stages.
  struct Best {
    double value = std::numeric_limits<double>::infinity();
    std::size_t num_layers = 0;
  };
  using Table = std::vector<std::vector<Best>>;  // indexed by [stages][first]
  const auto least = [&](auto&& combine) {
    // Values that differ only by rounding count as equal, so the cut does not depend on the absolute cost of equal
    // layers.
    constexpr double kRounding = 1.0 + 1e-9;
    Table best(count + 1, std::vector<Best>(num_layers + 1));
    best[0][num_layers].value = 0.0;
    for (std::size_t stages = 1; stages <= count; ++stages) {
      for (std::size_t first = 0; first < num_layers; ++first) {
        Best& here = best[stages][first];
        double cost = (stages == count ? embedding_cost : 0.0) + (stages == 1 ? head_cost : 0.0);
        for (std::size_t end = first + 1; end <= num_layers; ++end) {
          cost += layer_costs[end - 1];
          const double value = combine(cost, best[stages - 1][end].value);
          if (value <= here.value * kRounding) here = {value, end - first};
        }
      }
    }
    return best;
  };
  const double dearest = least([](double cost, double rest) { return std::max(cost, rest); })[count][0].value;
  const Table best = least([&](double cost, double rest) {
    return cost <= dearest ? cost * cost + rest : std::numeric_limits<double>::infinity();
  });
  std::vector<std::int64_t> sizes;
  std::size_t first = 0;
  for (std::size_t stages = count; stages > 0; --stages) {
    sizes.push_back(static_cast<std::int64_t>(best[stages][first].num_layers));
    first += best[stages][first].num_layers;
  }
  return stages_of_sizes(sizes);
}

std::vector<StageModules> cut_by_layers_per_stage(std::int64_t num_layers, std::int64_t layers_per_stage,
                                                  std::int64_t first_stage_less, std::int64_t last_stage_less) {
  TESSERA_CHECK(num_layers >= 1 && layers_per_stage >= 1 && first_stage_less >= 0 && last_stage_less >= 0,
                "{} {} {} {}", num_layers, layers_per_stage, first_stage_less, last_stage_less);
  const std::int64_t total = num_layers + first_stage_less + last_stage_less;
  const std::int64_t num_stages = (total - 1) / layers_per_stage + 1;
  if (num_stages == 1) return stages_of_sizes(std::vector{num_layers});
  const std::int64_t share = total / num_stages;
  for (const auto& [key, less] : {std::pair{"first", first_stage_less}, {"last", last_stage_less}}) {
    require(less <= share,
            "parallelism.pipeline_parallel_{}_stage_less_layers is {}; pipeline_parallel_layers_per_stage = {} cuts {} "
            "layers into {} stages, which hold {} at least: expected at most that",
            key, less, layers_per_stage, num_layers, num_stages, share);
  }
  std::vector<std::int64_t> sizes(static_cast<std::size_t>(num_stages), share);
  std::for_each_n(sizes.begin(), total % num_stages, [](std::int64_t& size) { ++size; });
  sizes.front() -= first_stage_less;
  sizes.back() -= last_stage_less;
  return stages_of_sizes(sizes);
}

std::vector<StageModules> stages_of_module_lists(std::span<const std::vector<std::string>> stages,
                                                 std::int64_t num_layers) {
  constexpr std::string_view kKey = "parallelism.module_fqns_per_model_part";
  // Each module has a place in the model: the embedding, the layers, the norm, the output projection.
  const std::int64_t norm = num_layers + 1, output = num_layers + 2;
  const auto name_of = [&](std::int64_t place) -> std::string {
    if (place == 0) return "tok_embeddings";
    if (place == norm) return "norm";
    if (place == output) return "output";
    return fmt::format("layers.{}", place - 1);
  };
  const auto place_of = [&](std::string_view name) -> std::int64_t {
    for (const std::int64_t place : {std::int64_t{0}, norm, output}) {
      if (name == name_of(place)) return place;
    }
    constexpr std::string_view kLayers = "layers.";
    std::int64_t layer = -1;
    if (name.starts_with(kLayers)) {
      std::from_chars(name.data() + kLayers.size(), name.data() + name.size(), layer);
    }
    // The names are compared as text, so that "layers.1x" and "layers.01" are rejected.
    require(0 <= layer && layer < num_layers && name == name_of(layer + 1),
            "{}: '{}' is no module of a model of {} layers; expected tok_embeddings, layers.0 to layers.{}, norm or "
            "output",
            kKey, name, num_layers, num_layers - 1);
    return layer + 1;
  };

  std::vector<StageModules> result;
  std::int64_t next = 0;
  for (std::size_t s = 0; s < stages.size(); ++s) {
    require(!stages[s].empty(), "{}: stage {} has no modules; expected one at least", kKey, s);
    StageModules stage{.first_layer = std::clamp<std::int64_t>(next - 1, 0, num_layers)};
    for (const std::string& name : stages[s]) {
      const std::int64_t place = place_of(name);
      require(place == next,
              "{}: stage {} has {} where {} is expected; every module is listed once, in the model's order", kKey, s,
              name, next <= output ? name_of(next) : "nothing more");
      require(place != output || name != stages[s].front(),
              "{}: stage {} has output without norm; expected both in the last stage", kKey, s);
      if (place == 0) stage.embedding = true;
      if (1 <= place && place <= num_layers) ++stage.num_layers;
      if (place == output) stage.head = true;
      ++next;
    }
    result.push_back(stage);
  }
  require(next == output + 1, "{}: {} is in no stage; every module is listed once, in the model's order", kKey,
          name_of(next));
  return result;
}

}  // namespace tessera
