// The figures of the report.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "compare/comparison.h"

namespace tessera {

/// All figures, each with its legend and what is drawn, as HTML.
std::string figures_html(const Comparison& comparison);

/// The figures of a side's quantization errors, whose curves are there. `side_idx` makes their ids unique in the page.
std::string sqnr_figures(const SideResult& side, std::size_t side_idx);

/// Operands in the order of a product, unknown ones at the end.
std::vector<std::string> operands_of(const std::map<std::string, Curve>& curves);

}  // namespace tessera
