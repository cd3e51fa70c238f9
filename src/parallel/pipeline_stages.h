// Says where a pipeline cuts the model, and so which modules each stage has.
//
// A cut is one StageModules per stage, in the order of the model. The first stage has the embedding, the last one the
// head, and layers follow each other. Schedules say which rank has which stages (parallel/pipeline_schedule.h).
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

/// Returns the cut whose most expensive stage is as cheap as possible. Among several, it chooses the one with the most
/// even costs (the least sum of squares). Among those, it chooses the one whose first stages have the most layers.
/// Every stage has at least one layer. Costs are those of one micro-batch, in any unit, and must not be negative.
/// Throws Error if there are fewer layers than stages.
std::vector<StageModules> cut_by_cost(std::span<const double> layer_costs, double embedding_cost, double head_cost,
                                      int num_stages);

/// Returns TorchTitan's cut. The embedding counts as `first_stage_less` layers and the head as `last_stage_less`.
/// ceil(count / layers_per_stage) stages get equal parts of the total count. If it does not divide, the first ones get
/// one more. The first and the last stage may have no layers. Throws Error if the embedding or the head counts more
/// than a stage holds.
std::vector<StageModules> cut_by_layers_per_stage(std::int64_t num_layers, std::int64_t layers_per_stage,
                                                  std::int64_t first_stage_less, std::int64_t last_stage_less);

/// Returns the cut that lists of module names describe, one list per stage: "tok_embeddings", "layers.0" and so on,
/// "norm", "output". Modules of multi-token prediction have no names. They go where "output" is. Throws Error for names
/// that the model does not have, and for modules that are missing, listed twice or out of order. Also throws it for a
/// stage without modules, and if "norm" and "output" are in different stages. The error names stage and module.
std::vector<StageModules> stages_of_module_lists(std::span<const std::vector<std::string>> stages,
                                                 std::int64_t num_layers);

}  // namespace tessera
