// Predicts how long a step takes: the record of its dry run, folded with a calibration.
#pragma once

#include <string>
#include <vector>

#include "plan/calibration.h"

namespace tessera {

/// Holds the predicted times of the operators of one name in one pass.
struct ForecastLine {
  std::string pass, name;
  std::size_t num_calls = 0;     // of a step
  double seconds = 0.0;          // of a step
  double flop = 0.0;             // of a step
  bool is_extrapolated = false;  // a call is far from all that were measured (OperatorRate::extrapolates)
};

struct StepForecast {
  std::vector<ForecastLine> lines;  // in the order in which their passes and operators come first
  double host_seconds = 0.0;        // besides the operators
  double seconds = 0.0;             // of a step

  /// Returns the seconds of all passes of that name, "forward", in all stages.
  double seconds_of(std::string_view pass) const;
};

/// Returns the operators of a step of `micro_batches` micro-batches. `dry_run` has those of one micro-batch
/// (TrainingStep::dry_run). Gradients of weights are assigned by the first micro-batch, and added to by the others.
std::vector<RecordedOperator> operators_of_step(const OperatorRecord& dry_run, std::int64_t micro_batches);

/// Throws Error if the calibration lacks a class of operators that the step has.
StepForecast forecast_step(const std::vector<RecordedOperator>& operators, const Calibration& calibration);

}  // namespace tessera
