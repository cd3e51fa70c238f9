#include "plan/step_forecast.h"

#include <algorithm>
#include <string_view>

namespace tessera {
namespace {

constexpr std::string_view kOptimizer = "optimizer";  // the pass that a step has once

bool is_weight_gradient(const RecordedOperator& call) {
  // A dense product of bfloat16 or float32 is a gemm, whose left operand is transposed in the gradient of a weight
  // only.
  return call.name.ends_with("_wgrad") || (call.name == "gemm" && call.transposes_a);
}

}  // namespace

double StepForecast::seconds_of(std::string_view pass) const {
  double sum = 0.0;
  for (const ForecastLine& line : lines) {
    if (line.pass.ends_with(pass)) sum += line.seconds;
  }
  return sum;
}

std::vector<RecordedOperator> operators_of_step(const OperatorRecord& dry_run, std::int64_t micro_batches) {
  std::vector<RecordedOperator> result;
  for (std::int64_t i = 0; i < micro_batches; ++i) {
    for (RecordedOperator call : dry_run.operators()) {
      if (call.pass == kOptimizer) continue;
      call.accumulates = call.accumulates || (i > 0 && is_weight_gradient(call));
      result.push_back(std::move(call));
    }
  }
  std::ranges::copy_if(dry_run.operators(), std::back_inserter(result),
                       [](const RecordedOperator& call) { return call.pass == kOptimizer; });
  return result;
}

StepForecast forecast_step(const std::vector<RecordedOperator>& operators, const Calibration& calibration) {
  StepForecast forecast;
  for (const RecordedOperator& call : operators) {
    const OperatorRate& rate = calibration.rate(class_of(call));
    const OperatorWork work = work_of(call);
    auto line = std::ranges::find_if(
        forecast.lines, [&](const ForecastLine& one) { return one.pass == call.pass && one.name == call.name; });
    if (line == forecast.lines.end()) {
      line = forecast.lines.insert(line, {.pass = call.pass, .name = call.name});
    }
    ++line->num_calls;
    line->seconds += rate.seconds(work);
    line->flop += work[OperatorWork::kFlop];
    line->is_extrapolated |= rate.extrapolates(work);
    forecast.seconds += rate.seconds(work);
  }
  forecast.host_seconds = calibration.seconds_per_operator * static_cast<double>(operators.size());
  forecast.seconds += forecast.host_seconds;
  return forecast;
}

}  // namespace tessera
