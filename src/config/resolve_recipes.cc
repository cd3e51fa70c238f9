#include "config/resolve_recipes.h"

#include <algorithm>
#include <set>

#include "base/error.h"

namespace tessera {
namespace {

const char* name_of(Precision precision) {
  switch (precision) {
    case Precision::kHigh:
      return "bf16";
    case Precision::kMxfp8:
      return "mxfp8";
    case Precision::kMxfp8Emulated:
      return "mxfp8_emulated";
    case Precision::kFp8Blockwise:
      return "fp8_blockwise";
  }
  return "";
}

const char* name_of(mx::ScalingMode mode) {
  switch (mode) {
    case mx::ScalingMode::kFloor:
      return "floor";
    case mx::ScalingMode::kRceil:
      return "rceil";
    case mx::ScalingMode::kCeil:
      return "ceil";
    case mx::ScalingMode::kEven:
      return "even";
  }
  return "";
}

mx::ScalingMode scaling_mode(const RecipeOptions& options, const std::string& section) {
  const bool names_one = options.recipe == Recipe::kMxfp8Cublas || options.recipe == Recipe::kMxfp8CublasRceil;
  const mx::ScalingMode named =
      options.recipe == Recipe::kMxfp8Cublas ? mx::ScalingMode::kFloor : mx::ScalingMode::kRceil;
  const mx::ScalingMode mode = options.scaling_mode.value_or(named);
  require(!names_one || mode == named,
          "{}.recipe_name names the scaling mode {}; leave {}.scaling_mode out, or take recipe_name = \"mxfp8\"",
          section, name_of(named), section);
  return mode;
}

/// Returns whether this is the weight of gate and up.
bool is_gate_and_up(const ParamSpec& spec) { return module_name(spec).ends_with(".w13"); }

/// Returns the precision of a site with `out` outputs. If they are two matrices side by side, each has half of them.
SitePrecision precision_of(const RecipeOptions& options, const std::string& section, std::int64_t out,
                           bool has_halves) {
  SitePrecision site;
  if (options.recipe == Recipe::kFp8Blockwise) {
    require(!options.scaling_mode &&
                (options.block_shape == BlockChoice::kOfRecipe || options.block_shape == BlockChoice::k128x128),
            "{}.recipe_name = \"fp8_blockwise\" has float32 scales and blocks of 128x128; leave scaling_mode and "
            "block_shape out",
            section);
    site.fprop = site.dgrad = site.wgrad = Precision::kFp8Blockwise;
    const mx::Format rows = {.scale_type = mx::ScaleType::kFloat32, .along = mx::kWideBlock};
    site.input = site.wgrad_input = site.gradient = site.wgrad_gradient = site.weight = rows;
    site.weight.across = mx::kWideBlock;
    return site;
  }
  const Precision precision = options.recipe == Recipe::kMxfp8Emulated ? Precision::kMxfp8Emulated : Precision::kMxfp8;
  site.fprop = site.dgrad = precision;
  site.wgrad = options.recipe == Recipe::kMxfp8WgradWithHp ? Precision::kHigh : precision;
  const mx::ScalingMode mode = scaling_mode(options, section);
  const auto blocks = [&](std::int32_t across, std::int32_t along) {
    return mx::Format{.mode = mode, .along = along, .across = across};
  };
  site.input = site.wgrad_input = site.gradient = site.wgrad_gradient = site.weight = blocks(1, mx::kBlock);
  if (options.block_shape == BlockChoice::k32x32) site.weight = blocks(mx::kBlock, mx::kBlock);
  if (options.block_shape == BlockChoice::k128x128 || options.block_shape == BlockChoice::k256x256) {
    site.input = site.gradient = site.wgrad_gradient = blocks(1, mx::kWideBlock);
    site.wgrad_input = site.weight = blocks(mx::kWideBlock, mx::kWideBlock);
  }
  if (options.block_shape == BlockChoice::k256x256) {
    site.input = blocks(1, mx::kWidestBlock);
    const bool has_cut_blocks = has_halves && out / 2 % mx::kWidestBlock != 0;
    if (!has_cut_blocks) site.gradient = site.input;
    site.weight = blocks(mx::kWidestBlock, mx::kWidestBlock);
  }
  return site;
}

/// Returns the names by which a pattern may find a module.
std::vector<std::string> names_of(const ParamSpec& spec) {
  const std::string name = module_name(spec);
  std::vector<std::string> names = {name};
  if (is_gate_and_up(spec)) {
    const std::string stem = name.substr(0, name.size() - 2);  // "….w"
    names.insert(names.end(), {stem + "1", stem + "3"});
  }
  return names;
}

/// Returns whether the pattern is part of one of the module's names.
bool matches(const ParamSpec& spec, const std::string& pattern) {
  const std::vector<std::string> names = names_of(spec);
  return std::any_of(names.begin(), names.end(),
                     [&](const std::string& name) { return name.find(pattern) != std::string::npos; });
}

/// Returns the names of modules of a kind (kNone: all) without their layer, to list in an error.
std::string known_modules(const Parameters& parameters, GemmKind kind) {
  std::set<std::string> names;
  for (ParamId id = 0; id < parameters.size(); ++id) {
    if (kind != GemmKind::kNone && parameters.spec(id).gemm != kind) continue;
    std::string name = module_name(parameters.spec(id));
    if (name.starts_with("layers.") || name.starts_with("mtp.")) {
      const std::size_t layer = name.find('.') + 1;
      name.replace(layer, name.find('.', layer) - layer, "N");
    }
    names.insert(name);
  }
  return fmt::format("{}", fmt::join(names, ", "));
}

/// Throws Error unless every pattern finds a module of the kind `of`. With kNone it may be of any kind.
void check_patterns(const RecipeOptions& options, const std::string& key, GemmKind of, const Parameters& parameters) {
  for (const std::string& pattern : options.fqns) {
    bool found = false;
    for (ParamId id = 0; id < parameters.size() && !found && !pattern.empty(); ++id) {
      const ParamSpec& spec = parameters.spec(id);
      found = (of == GemmKind::kNone || spec.gemm == of) && matches(spec, pattern);
    }
    require(found, "{} has '{}', which is part of no {} name; there are {} (w13: also w1, w3)", key, pattern,
            of == GemmKind::kNone ? "module's" : "grouped GEMM's", known_modules(parameters, of));
  }
}

bool any_match(const RecipeOptions& options, const ParamSpec& spec) {
  return std::any_of(options.fqns.begin(), options.fqns.end(),
                     [&](const std::string& pattern) { return matches(spec, pattern); });
}

/// Says how to leave a module of this kind in high precision.
const char* how_to_exclude(GemmKind kind) {
  if (kind == GemmKind::kOutput) return "leave convert_output out";
  return kind == GemmKind::kLinear ? "name it in filter_fqns" : "leave it out of fqns";
}

}  // namespace

std::string module_name(const ParamSpec& spec) {
  constexpr std::string_view kSuffix = ".weight";
  std::string name = spec.name;
  if (name.ends_with(kSuffix)) name.resize(name.size() - kSuffix.size());
  return name;
}

Recipes on_hopper(Recipes recipes) {
  for (std::optional<RecipeOptions>* options : {&recipes.linear, &recipes.grouped_mm}) {
    if (!*options || (*options)->block_shape != BlockChoice::kOfRecipe) continue;
    const Recipe recipe = (*options)->recipe;
    if (recipe != Recipe::kMxfp8Emulated && recipe != Recipe::kFp8Blockwise) {
      (*options)->block_shape = BlockChoice::k128x128;
    }
  }
  return recipes;
}

PrecisionTable resolve_recipes(const Recipes& recipes, const Parameters& parameters, const Parameters& whole) {
  if (!recipes.linear && !recipes.grouped_mm) return {};
  const std::string linear(kLinearConverter), grouped_mm(kGroupedConverter);
  if (recipes.linear) check_patterns(*recipes.linear, linear + ".filter_fqns", GemmKind::kNone, whole);
  if (recipes.grouped_mm) check_patterns(*recipes.grouped_mm, grouped_mm + ".fqns", GemmKind::kGrouped, whole);
  const auto converts = [&](const ParamSpec& spec) {
    switch (spec.gemm) {
      case GemmKind::kNone:
        return false;
      case GemmKind::kLinear:
        return recipes.linear && !any_match(*recipes.linear, spec);
      case GemmKind::kGrouped:
        return recipes.grouped_mm && any_match(*recipes.grouped_mm, spec);
      case GemmKind::kOutput:
        return recipes.linear && recipes.linear->convert_output;
    }
    return false;
  };
  bool found_linear = !recipes.linear, found_grouped = !recipes.grouped_mm;
  for (ParamId id = 0; id < whole.size(); ++id) {
    if (converts(whole.spec(id))) (whole.spec(id).gemm == GemmKind::kGrouped ? found_grouped : found_linear) = true;
  }
  require(found_linear, "{} leaves no module to convert: {}.filter_fqns has all of {}", linear, linear,
          known_modules(whole, GemmKind::kLinear));
  require(found_grouped, "{} has no module to convert: {}.fqns selects none of {}", grouped_mm, grouped_mm,
          known_modules(whole, GemmKind::kGrouped));
  PrecisionTable table(parameters.size());
  for (ParamId id = 0; id < parameters.size(); ++id) {
    const ParamSpec& spec = parameters.spec(id);
    if (!converts(spec)) continue;
    const bool is_linear = spec.gemm != GemmKind::kGrouped;
    const std::optional<RecipeOptions>& options = is_linear ? recipes.linear : recipes.grouped_mm;
    const std::string& section = is_linear ? linear : grouped_mm;
    const Shape& shape = parameters.local_shape(id);  // what a rank multiplies with
    const int last = shape.num_dims() - 1;
    const std::int64_t out = shape[last - 1], in = shape[last];
    const SitePrecision precision = precision_of(*options, section, out, is_gate_and_up(spec));
    if (out % mx::kBlock == 0 && in % mx::kBlock == 0) {
      table[id] = precision;
      continue;
    }
    require(options->unaligned == Unaligned::kHigh,
            "{} is {} x {}, which blocks of {} do not divide; {}, or set {}.unaligned = \"bf16\" to leave such modules "
            "in high precision",
            module_name(spec), out, in, mx::kBlock, how_to_exclude(spec.gemm), section);
  }
  return table;
}

std::string describe_precisions(const Parameters& parameters, const PrecisionTable& table) {
  std::string text = fmt::format("{:<44} {:>18} {:<15}{:<15}{:<15}{}\n", "module", "out x in", "fprop", "dgrad",
                                 "wgrad", "weight's blocks");
  for (ParamId id = 0; id < parameters.size(); ++id) {
    const ParamSpec& spec = parameters.spec(id);
    if (spec.gemm == GemmKind::kNone) continue;
    const SitePrecision site = table.empty() ? SitePrecision() : table[id];
    const int last = spec.shape.num_dims() - 1;
    std::string sizes = fmt::format("{} x {}", spec.shape[last - 1], spec.shape[last]);
    if (last == 2) sizes = fmt::format("{} x {}", spec.shape[0], sizes);
    std::string blocks;
    if (site.quantizes()) {
      blocks = fmt::format("{}x{} {}", site.weight.across, site.weight.along,
                           site.weight.scale_type == mx::ScaleType::kFloat32 ? "float32" : name_of(site.weight.mode));
    }
    text += fmt::format("{:<44} {:>18} {:<15}{:<15}{:<15}{}\n", module_name(spec), sizes, name_of(site.fprop),
                        name_of(site.dgrad), name_of(site.wgrad), blocks);
  }
  return text;
}

}  // namespace tessera
