// Turns recipes into the precision of every GEMM site.
#pragma once

#include <string>

#include "config/recipe.h"
#include "params/precision.h"

namespace tessera {

/// Returns the recipes with the defaults for Hopper, whose 8-bit tensor cores take one scale for 128 numbers. MXFP8
/// that is computed in 8 bits gets the blocks k128x128 where no blocks are asked for. Other blocks are multiplied as
/// bfloat16.
Recipes on_hopper(Recipes recipes);

/// Returns the precision of every parameter's GEMMs. It is empty without converters. `parameters` may be those of some
/// stages of a pipeline only. Patterns must find something in `whole`. Throws Error for options that contradict each
/// other, a pattern that no module's name contains, and a converter that finds nothing to convert. Also throws it for a
/// site whose sizes do not fit, if that is an error.
PrecisionTable resolve_recipes(const Recipes& recipes, const Parameters& parameters, const Parameters& whole);
inline PrecisionTable resolve_recipes(const Recipes& recipes, const Parameters& parameters) {
  return resolve_recipes(recipes, parameters, parameters);
}

/// Returns a table of the sites for people: module, sizes, the three GEMMs' precisions, blocks.
std::string describe_precisions(const Parameters& parameters, const PrecisionTable& table);

/// Returns a site's module, as TorchTitan names it: the parameter without ".weight". The fused w13 has the name of the
/// experts or the feed-forward network with w13. Patterns find it as w1 and w3 too.
std::string module_name(const ParamSpec& spec);

}  // namespace tessera
