// From recipes to the precision of every GEMM site.
#pragma once

#include <string>

#include "config/recipe.h"
#include "params/precision.h"

namespace tessera {

/// What the defaults are on Hopper, whose 8-bit tensor cores take one scale for 128 numbers: MXFP8 that is computed in
/// 8 bits has the blocks k128x128 where none are asked for. Others are multiplied as bfloat16.
Recipes on_hopper(Recipes recipes);

/// The precision of every parameter's GEMMs; empty without converters. Throws Error for options that contradict each
/// other, a pattern that no module's name contains, a converter that finds nothing to convert, and a site whose sizes
/// do not fit, if that is an error. `whole`: where patterns must find something, if `parameters` are of some stages of
/// a pipeline only.
PrecisionTable resolve_recipes(const Recipes& recipes, const Parameters& parameters, const Parameters& whole);
inline PrecisionTable resolve_recipes(const Recipes& recipes, const Parameters& parameters) {
  return resolve_recipes(recipes, parameters, parameters);
}

/// The sites as a table for people: module, sizes, the three GEMMs' precisions, blocks.
std::string describe_precisions(const Parameters& parameters, const PrecisionTable& table);

/// A site's module, as TorchTitan names it: the parameter without ".weight". The fused w13 has the experts' or the feed
/// forward's name with w13, and is found as w1 and w3 too.
std::string module_name(const ParamSpec& spec);

}  // namespace tessera
