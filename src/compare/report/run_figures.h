// The figures of a run's report.
#pragma once

#include <string>

#include "compare/run_record.h"

namespace tessera {

/// "340 ms", "41.5 s", "17 min", "3 h 5 min", "2 d 4 h".
std::string duration_text(double seconds);

/// All figures for which the run has numbers, as HTML, each with its legend and what is drawn.
std::string run_figures_html(const RunRecord& run);

}  // namespace tessera
