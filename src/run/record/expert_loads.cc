#include "run/record/expert_loads.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <optional>
#include <span>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "run/record/run_files.h"

namespace tessera {
namespace {

constexpr const char* kFormat = "tessera expert loads";
constexpr std::uint64_t kVersion = 1;

}  // namespace

const std::vector<double>& ExpertLoads::of_layer(const std::string& layer) const {
  const auto found = tokens.find(layer);
  require(found != tokens.end(), "'{}' has no loads of {}: it is of a run of another model", path.string(), layer);
  return found->second;
}

double ExpertLoads::busiest_rank(const std::string& layer, std::int64_t num_experts, std::int64_t num_ranks) const {
  const std::vector<double>& experts = of_layer(layer);
  require(std::ssize(experts) == num_experts, "'{}' has {} experts in {}, and the model has {}", path.string(),
          experts.size(), layer, num_experts);
  const auto of_rank = static_cast<std::size_t>(num_experts / num_ranks);
  double most = 0.0;
  for (std::size_t first = 0; first < experts.size(); first += of_rank) {
    const std::span<const double> rank = std::span(experts).subspan(first, of_rank);
    most = std::max(most, std::accumulate(rank.begin(), rank.end(), 0.0));
  }
  return most * static_cast<double>(num_ranks) / std::accumulate(experts.begin(), experts.end(), 0.0);
}

void write_expert_loads(const ExpertLoads& loads, const std::filesystem::path& path) {
  const nlohmann::ordered_json file = {
      {"format", kFormat}, {"version", kVersion}, {"step", loads.step}, {"tokens", loads.tokens}};
  write_whole_file(path, json_text(file) + "\n");
}

ExpertLoads read_expert_loads(const std::filesystem::path& path) {
  ExpertLoads loads;
  loads.path = std::filesystem::is_directory(path) ? path / kExpertLoadsName : path;
  const std::optional<nlohmann::json> json = read_json_file(loads.path, kFormat, kVersion);
  require(json.has_value(), "there is no '{}': a run with experts writes it to its folder when it logs a step",
          loads.path.string());
  const JsonFields fields(*json, fmt::format("'{}', $", loads.path.string()));
  loads.step = static_cast<std::int64_t>(fields.count("step", std::numeric_limits<std::int64_t>::max()));
  const nlohmann::json& layers = fields.at("tokens");
  const JsonFields of_layers(layers, fields.place_of("tokens"));
  for (const auto& [layer, array] : layers.items()) {
    std::vector<double>& tokens = loads.tokens[layer];
    for (const nlohmann::json& number : of_layers.array(layer.c_str())) {
      require(number.is_number() && number.get<double>() >= 0.0, "{}: expected numbers of tokens, got {}",
              of_layers.place_of(layer.c_str()), describe_json(number));
      tokens.push_back(number.get<double>());
    }
    require(std::accumulate(tokens.begin(), tokens.end(), 0.0) > 0.0, "{}: no expert has tokens",
            of_layers.place_of(layer.c_str()));
  }
  return loads;
}

}  // namespace tessera
