// Predicts how long a step takes: the records of the ranks' dry runs, folded with the times of operators and transfers.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "parallel/pipeline_timing.h"
#include "plan/calibration.h"

namespace tessera {

/// Says how long things take on a machine.
struct StepTimes {
  std::function<OperatorTime(const RecordedOperator&)> of_operator;
  std::function<double(const RecordedTransfer&)> of_transfer;  // seconds; unused without transfers
  double seconds_per_operator = 0.0;                           // for the host, besides the operator
  double least_per_operator = 0.0;      // a pass takes at least this for each of its operators: the host starts them
  double overlap_cost = 0.0;            // of the duration of a transfer beside operators, the part that they lose
  double dispatch_overlap_cost = 0.0;   // the same for a dispatcher's calls
  bool overlaps_micro_batches = false;  // a dispatcher's calls run beside operators of another micro-batch, if any
  std::function<bool(const RecordedTransfer&)> is_far = {};  // whether a transfer leaves the domain; unset: none does
  /// The rows of an MoE layer's experts, as a multiple of those of a balanced load; unset: 1.
  std::function<double(const std::string& layer)> load_of = {};
  bool keeps_events = false;  // fills RankForecast::events
};

/// Holds the predicted times of the operators or transfers of one name in one pass.
struct ForecastLine {
  int stage = -1;                // of the pass; -1: the pass is the whole rank's, once in a step
  std::string pass, name;        // "forward", "gemm"
  bool is_transfer = false;      // the name is the kind and the axis
  std::size_t num_calls = 0;     // of a step
  double seconds = 0.0;          // of a step; of transfers what they add to it
  double hidden_seconds = 0.0;   // of transfers, what runs beside operators and adds nothing
  double flop = 0.0;             // of a step
  double error_seconds = 0.0;    // what `seconds` may be off by: OperatorTime::error; of transfers kUnmeasuredError
  bool is_extrapolated = false;  // OperatorTime::is_extrapolated of a call

  /// Returns the pass with its stage: "stage 0 forward".
  std::string pass_of_stage() const { return stage < 0 ? pass : fmt::format("stage {} {}", stage, pass); }
};

/// Holds the mean times of the passes of one stage and one micro-batch, in seconds.
struct StageTimes {
  int stage = 0;
  double forward = 0.0, backward = 0.0, weight_gradients = 0.0;
};

/// Describes when an operator or transfer of a micro-batch runs.
struct ForecastEvent {
  enum class Lane { kProducts, kAttention, kMemory, kDomain, kNetwork };  // the last two are transfers
  int stage = -1;
  std::string pass, name;
  Lane lane = Lane::kProducts;
  double begin = 0.0, seconds = 0.0;  // `begin` counts from the start of the record's first operator
};

/// Describes the step of one rank of the pipeline.
struct RankForecast {
  std::vector<ForecastLine> lines;  // in the order in which their passes and names come first
  std::vector<StageTimes> stages;
  double host_seconds = 0.0;     // besides operators and transfers; a part of the passes' times
  double message_seconds = 0.0;  // a message to the next stage
  // What a step has once: weights that stay gathered, the sums of gradients that are completed at its end, and the
  // update of the weights.
  double gather_seconds = 0.0, reduction_seconds = 0.0, optimizer_seconds = 0.0;
  double bubble_seconds = 0.0;
  std::vector<ForecastEvent> events;  // StepTimes::keeps_events

  double once_seconds() const { return gather_seconds + reduction_seconds + optimizer_seconds; }
  /// Returns the seconds of all passes of that name, "forward", in all stages.
  double seconds_of(std::string_view pass) const;
  /// Gives the stages, in their order, the numbers of other stages that have the same modules.
  void renumber(std::span<const int> stages);
};

struct StepForecast {
  std::vector<RankForecast> ranks;  // of the pipeline
  double passes_seconds = 0.0;      // from the first pass to the last one's end
  double seconds = 0.0;             // of a step
  std::size_t slowest = 0;          // the rank of the pipeline with the most work
  /// Returns what the step may be off by if the errors of the slowest rank's lines are independent.
  double error_seconds() const;
};

/// Predicts a rank's part of a step from its dry run (TrainingStep::dry_run). Gradients of weights are assigned by the
/// first micro-batch, and added to by the others. `gathers_once`: weights are gathered once in a step, and not for
/// every micro-batch (ModelOptions::keep_gathered). Throws Error if an operator's time is not known.
RankForecast forecast_rank(const StepRecord& dry_run, int num_micro_batches, bool gathers_once, const StepTimes& times);

/// Names the line of what a pass waits for the host (StepTimes::least_per_operator).
inline constexpr const char* kWaitForHost = "waiting for the host";

/// Returns what passes cost, for the simulation of a schedule with so many stages.
PipelineCosts pipeline_costs(std::span<const RankForecast> ranks, int num_stages);

/// Predicts the step of a pipeline, whose ranks it takes in order.
StepForecast forecast_step(std::vector<RankForecast> ranks, const PipelineSchedule& schedule);

/// Returns a call or transfer of a dry run as it is where experts have `load` times the rows of a balanced load.
RecordedOperator with_load(RecordedOperator call, double load);
RecordedTransfer with_load(RecordedTransfer transfer, double load);

/// Returns a call of a dry run as it is in a step's micro-batches after the first one.
RecordedOperator in_later_micro_batch(RecordedOperator call);

}  // namespace tessera
