#include "plan/precision_choice.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/error.h"

namespace tessera {
namespace {

constexpr const char* kBf16 = "bf16";
constexpr std::pair<const char*, Recipe> kRecipes[] = {{"mxfp8", Recipe::kMxfp8},
                                                       {"fp8_blockwise", Recipe::kFp8Blockwise}};

}  // namespace

std::string precision_of(const JobConfig& job) {
  if (job.training.mixed_precision_param != DType::kBFloat16) return kConfiguredPrecision;
  const Recipes recipes = job.recipes();
  if (!recipes.linear && !recipes.grouped_mm) return kBf16;
  for (const auto& [name, recipe] : kRecipes) {
    if (recipes.linear && recipes.grouped_mm && recipes.linear->recipe == recipe &&
        recipes.grouped_mm->recipe == recipe) {
      return name;
    }
  }
  return kConfiguredPrecision;
}

std::vector<std::string> precisions_of_products(const JobConfig& job) {
  std::vector<std::string> result;
  const Recipes recipes = job.recipes();
  if (job.training.mixed_precision_param == DType::kBFloat16 && (!recipes.linear || !recipes.grouped_mm)) {
    result.emplace_back(kBf16);
  }
  for (const auto& [name, recipe] : kRecipes) {
    const auto has = [&](const std::optional<RecipeOptions>& options) { return options && options->recipe == recipe; };
    if (has(recipes.linear) || has(recipes.grouped_mm)) result.emplace_back(name);
  }
  return result;
}

void require_known_precision(const std::string& name, const std::string& where) {
  const bool is_known =
      name == kBf16 || std::ranges::any_of(kRecipes, [&](const auto& one) { return name == one.first; });
  require(is_known, "{}no precision '{}': bf16, mxfp8 and fp8_blockwise are known", where, name);
}

JobConfig in_precision(const JobConfig& job, const std::string& name) {
  if (name == precision_of(job)) return job;
  require_known_precision(name);
  JobConfig result = job;
  result.training.mixed_precision_param = DType::kBFloat16;
  result.model.converters.clear();
  if (name == kBf16) return result;
  const auto recipe = std::ranges::find(kRecipes, name, [](const auto& one) { return std::string(one.first); });
  result.model.converters = {std::string(kLinearConverter), std::string(kGroupedConverter)};
  for (RecipeOptions* options : {&result.quantize_mx.linear, &result.quantize_mx.grouped_mm}) {
    options->recipe = recipe->second;
    options->scaling_mode = std::nullopt;
    options->block_shape = BlockChoice::kOfRecipe;
  }
  return result;
}

}  // namespace tessera
