// Writes the report of a comparison: an HTML file, the same numbers as JSON, and lines for a terminal. The HTML file
// has no scripts and needs no other file. docs/compare.md says how to read it.
#pragma once

#include <string>
#include <vector>

#include "compare/comparison.h"

namespace tessera {

/// Returns the HTML file, which is also well-formed XML. All text that comes from files is escaped.
std::string report_html(const Comparison& comparison);

/// Returns {"format": "tessera-compare", "version": 1, "sides": [...], ...}. Numbers that are not finite are null.
std::string report_json(const Comparison& comparison);

/// Returns "LABEL against BASELINE: VERDICT" for each side that is compared, and the table, for a terminal.
std::string report_text(const Comparison& comparison);

/// Returns the table of results: a heading row of labels, then rows with a name and a cell per side.
std::vector<std::vector<std::string>> summary_table(const Comparison& comparison);

}  // namespace tessera
