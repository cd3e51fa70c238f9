// Draws the figures of the report.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "compare/comparison.h"

namespace tessera {

/// Returns all figures as HTML, each with its legend and a caption that says what is drawn.
std::string figures_html(const Comparison& comparison);

/// Returns the figures of a side's quantization errors. The side must have their curves. `side_idx` makes their ids
/// unique in the page.
std::string sqnr_figures(const SideResult& side, std::size_t side_idx);

/// Returns the operands in the order of a product, with unknown ones at the end.
std::vector<std::string> operands_of(const std::map<std::string, Curve>& curves);

}  // namespace tessera
