// Precisions by name, as a search tries them: "bf16", or a recipe for all products that model.converters can name.
#pragma once

#include <string>
#include <vector>

#include "config/job_config.h"

namespace tessera {

/// Names a precision that is none of those that in_precision() knows: products in float32, or some in low precision.
inline constexpr const char* kConfiguredPrecision = "configured";

/// Returns "bf16", "mxfp8" or "fp8_blockwise", or kConfiguredPrecision for any other mixture.
std::string precision_of(const JobConfig& job);

/// Returns the precisions of the run's products, as in_precision() names them: a recipe for some products is one, too.
/// Products in float32 have none.
std::vector<std::string> precisions_of_products(const JobConfig& job);

/// Throws Error, which begins with `where` and names the known ones, if in_precision() does not know the name.
void require_known_precision(const std::string& name, const std::string& where = "");

/// Returns the run in that precision. If it has it already, nothing changes. Throws Error, which names the known ones,
/// for another name.
JobConfig in_precision(const JobConfig& job, const std::string& name);

}  // namespace tessera
