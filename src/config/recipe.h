// Recipes: what the configuration's converters say, TorchTitan's [quantize.linear.mx] and [quantize.grouped_mm.mx].
// docs/mxfp8.md explains them, config/resolve_recipes.h turns them into the precision of every GEMM site.
//
// Never quantized, whatever is asked for: router gate, embedding, norms, the attention core, and a multi-token
// prediction module's input projection. The output projection is quantized only where convert_output asks for it.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "mx/block.h"

namespace tessera {

/// The converters' names, which are their sections' too.
inline constexpr std::string_view kLinearConverter = "quantize.linear.mx";
inline constexpr std::string_view kGroupedConverter = "quantize.grouped_mm.mx";

/// What `recipe_name` names.
enum class Recipe {
  kMxfp8,             // all three GEMMs in MXFP8
  kMxfp8Cublas,       // TorchTitan's name for that with ScalingMode::kFloor
  kMxfp8CublasRceil,  // ... and with kRceil
  kMxfp8WgradWithHp,  // the weight gradient in high precision
  kMxfp8Emulated,
  kFp8Blockwise,
};

/// The weights' blocks; with 128×128 those of activations and gradients are 1×128, else 1×32. kOfRecipe: of MXFP8 1×32,
/// but for on_hopper(); of fp8_blockwise 128×128.
enum class BlockChoice { kOfRecipe, k1x32, k32x32, k128x128 };
/// What becomes of a site whose sizes are no multiples of 32.
enum class Unaligned { kError, kHigh };

struct RecipeOptions {
  Recipe recipe = Recipe::kMxfp8;
  /// Parts of module names, as TorchTitan's: of the linear converter those that stay in high precision (filter_fqns),
  /// of the grouped one those that it is for (fqns).
  std::vector<std::string> fqns;
  std::optional<mx::ScalingMode> scaling_mode = std::nullopt;  // none: the recipe's; kRceil but for kMxfp8Cublas
  BlockChoice block_shape = BlockChoice::kOfRecipe;
  Unaligned unaligned = Unaligned::kError;
  /// Of the linear converter: the output projection, too, whatever its fqns say.
  bool convert_output = false;
};

/// The converters in use.
struct Recipes {
  std::optional<RecipeOptions> linear, grouped_mm;
};

}  // namespace tessera
