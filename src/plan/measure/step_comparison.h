// Compares the operators of a measured step with what the planner predicts for them, so that wrong rates are found.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "plan/calibration.h"
#include "tensor/step_record.h"

namespace tessera {

/// Holds the times of the calls of one operator with one type of operand.
struct ComparedOperators {
  std::string name;  // "gemm += bfloat16"
  std::size_t num_calls = 0;
  double predicted = 0.0, measured = 0.0;  // seconds of a step
};

/// Returns the groups of a step's operators, those with the largest differences first. `operators` have the durations
/// that were measured. Throws what `predict` throws.
std::vector<ComparedOperators> compare_operators(std::span<const RecordedOperator> operators,
                                                 const std::function<OperatorTime(const RecordedOperator&)>& predict);

}  // namespace tessera
