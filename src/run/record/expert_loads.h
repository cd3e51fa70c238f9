// How many tokens a run's experts got, in a file of its folder. `tessera plan` predicts steps with such loads.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace tessera {

struct ExpertLoads {
  std::int64_t step = 0;                              // whose loads they are
  std::map<std::string, std::vector<double>> tokens;  // by MoE layer ("layers.1.moe"), of each expert
  std::filesystem::path path = {};                    // the file that they were read from, for errors

  /// Returns the tokens of a layer's experts. Throws Error, which names the file, if the layer has no loads.
  const std::vector<double>& of_layer(const std::string& layer) const;
  /// Returns the load of the busiest of `num_ranks` ranks, divided by their mean. Ranks have equally many experts, in
  /// order. Throws Error, which names the file, if the layer has no loads of `num_experts` experts.
  double busiest_rank(const std::string& layer, std::int64_t num_experts, std::int64_t num_ranks) const;
};

void write_expert_loads(const ExpertLoads& loads, const std::filesystem::path& path);

/// Reads the file, or the one in that folder of a run. Throws Error if there is none, or if it holds no loads.
ExpertLoads read_expert_loads(const std::filesystem::path& path);

}  // namespace tessera
