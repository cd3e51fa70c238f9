// Measures how often transformers' DeepseekV2 router would choose other experts than a saved model's own, on a sample
// of tokens. The other router has no expert bias, and scores a group of experts by its best one.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "run/state/saved_model.h"

namespace tessera {

/// Says how two routers differ in one layer. This layer chooses `num_selections` experts (tokens times top-k). Of
/// these, `num_different` are not among those that DeepseekV2's router would choose for the same token.
struct RoutingDifference {
  std::string layer;
  std::int64_t num_different = 0;
  std::int64_t num_selections = 0;
};

/// Returns the difference for each MoE layer, except those of multi-token prediction. Runs the model's forward over the
/// tokens, as one document and in float32, with the weights of one layer in memory at a time. The model's router must
/// be a softmax router.
std::vector<RoutingDifference> compare_with_v2_router(const SavedModel& saved, std::span<const std::int32_t> tokens);

}  // namespace tessera
