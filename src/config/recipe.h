// Recipes: what the configuration's converters say. These are TorchTitan's [quantize.linear.mx] and
// [quantize.grouped_mm.mx]. docs/mxfp8.md explains them. config/resolve_recipes.h turns them into the precision of
// every GEMM site.
//
// Some parts are never quantized, whatever is asked for: router gate, embedding, norms, the attention core, and a
// multi-token prediction module's input projection. The output projection is quantized only where convert_output asks
// for it.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "mx/block.h"

namespace tessera {

/// The converters' names, which are also those of their sections.
inline constexpr std::string_view kLinearConverter = "quantize.linear.mx";
inline constexpr std::string_view kGroupedConverter = "quantize.grouped_mm.mx";

/// The values of `recipe_name`.
enum class Recipe {
  kMxfp8,             // all three GEMMs in MXFP8
  kMxfp8Cublas,       // TorchTitan's name for kMxfp8 with ScalingMode::kFloor
  kMxfp8CublasRceil,  // TorchTitan's name for kMxfp8 with ScalingMode::kRceil
  kMxfp8WgradWithHp,  // as kMxfp8, but the weight gradient in high precision
  kMxfp8Emulated,
  kFp8Blockwise,
};

/// The blocks of weights. With 128×128 the blocks of activations and gradients are 1×128, with 256×256 they are 1×256,
/// and otherwise 1×32. With MXFP8 and either of the two, the blocks of wgrad's operands are 1×128 for the gradient and
/// 128×128 for the input. With 256×256, the gradient of gate and up has blocks of 1×128 in dgrad, too, if the width of
/// each is no multiple of 256, because the two lie side by side. kOfRecipe is 128×128 for fp8_blockwise. For MXFP8 it
/// is 1×32, unless on_hopper() changes it.
enum class BlockChoice { kOfRecipe, k1x32, k32x32, k128x128, k256x256 };
/// Says what happens to a site whose sizes are no multiples of 32.
enum class Unaligned { kError, kHigh };

struct RecipeOptions {
  Recipe recipe = Recipe::kMxfp8;
  /// Parts of module names, as TorchTitan's. For the linear converter they are those that stay in high precision
  /// (filter_fqns). For the grouped one they are those that it converts (fqns).
  std::vector<std::string> fqns;
  std::optional<mx::ScalingMode> scaling_mode = std::nullopt;  // not set: kRceil, but kFloor for kMxfp8Cublas
  BlockChoice block_shape = BlockChoice::kOfRecipe;
  Unaligned unaligned = Unaligned::kError;
  /// True if the linear converter also converts the output projection, whatever its fqns say.
  bool convert_output = false;
};

/// Holds the converters that are in use.
struct Recipes {
  std::optional<RecipeOptions> linear, grouped_mm;
};

}  // namespace tessera
