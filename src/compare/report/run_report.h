// The report of one run, finished or not: one HTML page that needs no other file. docs/report.md says what is on it.
#pragma once

#include <chrono>
#include <filesystem>
#include <string>

#include "compare/run_record.h"

namespace tessera {

/// Throws Error unless the folder holds a run.
void require_run(const std::filesystem::path& folder);

struct RunStatus {
  enum class Kind { kFinished, kUnfinished, kBroken };
  Kind kind = Kind::kUnfinished;
  std::string text;  // "Step 340 of 1000 (34 %)"
};

/// Returns how far the run has come.
RunStatus run_status(const RunRecord& run);

/// Returns the page, which is also well-formed XML. All text that comes from files is escaped. `as_of` is the time at
/// which the run's last line was written. Throws Error for a run without a logged step.
std::string run_report_html(const RunRecord& run, std::chrono::system_clock::time_point as_of);

}  // namespace tessera
