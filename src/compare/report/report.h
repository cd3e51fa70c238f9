// The report of a comparison: one HTML file that needs nothing else (no script, no other file), the same numbers as
// JSON, and lines for a terminal. docs/compare.md says how to read it.
#pragma once

#include <string>
#include <vector>

#include "compare/comparison.h"

namespace tessera {

/// Well-formed XML as well. All text that comes from files is escaped.
std::string report_html(const Comparison& comparison);

/// {"format": "tessera-compare", "version": 1, "sides": [...], ...}; numbers that are not finite are null.
std::string report_json(const Comparison& comparison);

/// "LABEL against BASELINE: VERDICT" per compared side, and the table, for a terminal.
std::string report_text(const Comparison& comparison);

/// The table of results: a heading row of labels, then rows of a name and a cell per side.
std::vector<std::vector<std::string>> summary_table(const Comparison& comparison);

}  // namespace tessera
