// Makes a page of a forecast that needs no other file: what a step consists of, a layer's operators and transfers as
// lanes, the pipeline with its stages' times, and the layouts of a search.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "plan/layout_search.h"

namespace tessera {

/// A run that was measured, and its forecast: tokens/s per GPU, or layers per second.
struct ValidatedRun {
  double measured = 0.0, predicted = 0.0;
};

/// Reads what bench/forecast_gpu.py writes. Throws Error, which names the file and the key, if it is something else.
std::vector<ValidatedRun> read_validation(const std::filesystem::path& path);

struct PlanPage {
  std::string title;            // "671B on 256 B200"
  std::string layout;           // "pipeline 32, experts 8"
  const RunForecast& forecast;  // with its events
  const Cluster& cluster;
  const std::vector<FoundLayout>& layouts;      // of a search, the fastest first; may be empty
  const std::vector<ValidatedRun>& validation;  // may be empty
};

/// Says what a step's time consists of, from products at the GPU's peak to the wait for the slowest GPU. The parts add
/// up to the step. Names are for people.
struct StepPart {
  std::string name;
  double seconds = 0.0;
};
std::vector<StepPart> parts_of_step(const RunForecast& forecast, const Cluster& cluster);

/// Returns the page.
std::string plan_page(const PlanPage& page);

}  // namespace tessera
