// Simulates a pipeline schedule. It finds when its actions run, what a rank holds meanwhile, and whether it can run at
// all.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "parallel/pipeline_schedule.h"

namespace tessera {

/// Holds costs in any unit of time. A vector has one number for all stages, or one per stage.
struct PipelineCosts {
  // The costs of one stage and one micro-batch. A whole backward costs the sum of both halves.
  std::vector<double> forward = {1.0};
  std::vector<double> backward_input = {1.0};
  std::vector<double> backward_weight = {1.0};
  double overlapped = 1.0;     // cost of two overlapped passes, as a part of the sum of both
  double communication = 0.0;  // time of a message to another rank; both ranks compute meanwhile
};

struct PipelineTiming {
  struct Span {
    double start = 0.0, end = 0.0;
  };
  std::vector<std::vector<Span>> spans;  // by rank and action
  double makespan = 0.0;
  std::vector<double> bubble_fraction;  // by rank: the part of the makespan in which it is idle
  std::vector<int> peak_in_flight;      // by rank: most activations (of one stage and micro-batch each) held at once

  double mean_bubble_fraction() const;
};

/// Simulates the schedule. Every rank runs its actions in order, each as soon as the rank is free and its inputs are
/// there. A forward reads the forward of the stage before. A backward or an input gradient reads its own forward and
/// the gradient of the stage after. Weight gradients read their own input gradient. An activation is held from the
/// start of its forward to the end of its backward or weight gradients.
/// Throws Error if ranks wait for each other forever, and names what each of them waits for. Also throws it if a stage
/// or micro-batch does not exist, or if a cost is not above 0 (communication: below 0).
PipelineTiming simulate(const PipelineSchedule& schedule, const PipelineCosts& costs = {});

/// Throws Error, which names rank and pass, unless the schedule is correct. Every stage must have one forward and one
/// backward of every micro-batch, the backward whole or as its two halves in order. Every pass must be on its stage's
/// rank, and only forwards may overlap with backwards. The schedule must run to its end (simulate). With max_in_flight
/// it also throws if a rank holds more activations at once.
void check(const PipelineSchedule& schedule, std::optional<int> max_in_flight = {});

}  // namespace tessera
