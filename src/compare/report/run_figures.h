// Draws the figures of a run's report.
#pragma once

#include <string>

#include "compare/run_record.h"

namespace tessera {

/// Returns a text such as "340 ms", "41.5 s", "17 min", "3 h 5 min" or "2 d 4 h".
std::string duration_text(double seconds);

/// Returns all figures for which the run has numbers, as HTML. Each has its legend and a caption that says what is
/// drawn.
std::string run_figures_html(const RunRecord& run);

}  // namespace tessera
