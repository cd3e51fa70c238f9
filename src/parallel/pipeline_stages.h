// Where a pipeline cuts the model: which modules each stage has.
//
// A cut is one StageModules per stage, in the order of the model: the first stage has the embedding, the last the head,
// and layers follow each other. Schedules say which rank has which stages (parallel/pipeline_schedule.h).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace tessera {

struct StageModules {
  bool embedding = false;
  std::int64_t first_layer = 0, num_layers = 0;
  bool head = false;  // final norm, output projection, multi-token prediction

  friend bool operator==(const StageModules&, const StageModules&) = default;
};

/// The cut whose dearest stage is as cheap as possible; of several, the one with the most even costs (the least sum of
/// their squares); of these, the one whose first stages have the most layers. Every stage has at least one layer. Costs
/// are in any unit, of one micro-batch; none is below 0. Throws Error if there are fewer layers than stages.
std::vector<StageModules> cut_by_cost(std::span<const double> layer_costs, double embedding_cost, double head_cost,
                                      int num_stages);

/// TorchTitan's cut. The embedding counts as `first_stage_less` layers, the head as `last_stage_less`; ceil(count /
/// layers_per_stage) stages have equal parts of the count, the first ones one more if it does not divide. The first
/// and the last stage can be without layers. Throws Error if the embedding or the head counts more than a stage holds.
std::vector<StageModules> cut_by_layers_per_stage(std::int64_t num_layers, std::int64_t layers_per_stage,
                                                  std::int64_t first_stage_less, std::int64_t last_stage_less);

/// The cut that lists of module names describe, one list per stage: "tok_embeddings", "layers.0" and so on, "norm",
/// "output". Modules of multi-token prediction have no names, they are where "output" is. Throws Error, naming stage
/// and module, for names that are not the model's, for modules that are missing, listed twice or out of order, for a
/// stage without modules, and if "norm" and "output" are in different stages.
std::vector<StageModules> stages_of_module_lists(std::span<const std::vector<std::string>> stages,
                                                 std::int64_t num_layers);

}  // namespace tessera
