// When the actions of a pipeline schedule run, what a rank holds meanwhile, and whether a schedule can run at all.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "parallel/pipeline_schedule.h"

namespace tessera {

/// In any unit of time. A vector has one number for all stages, or one per stage.
struct PipelineCosts {
  // Of a stage and a micro-batch. A whole backward takes the sum of both halves.
  std::vector<double> forward = {1.0};
  std::vector<double> backward_input = {1.0};
  std::vector<double> backward_weight = {1.0};
  double overlapped = 1.0;                          // what two overlapped passes take, as a part of the sum of both
  double communication = 0.0;                       // of a message to another rank, while both ranks compute
  std::vector<std::int64_t> activation_bytes = {};  // that a stage holds for a micro-batch; empty: not known
};

struct PipelineTiming {
  struct Span {
    double start = 0.0, end = 0.0;
  };
  std::vector<std::vector<Span>> spans;  // per rank and action
  double makespan = 0.0;
  std::vector<double> bubble_fraction;   // per rank: the part of the makespan in which it is idle
  std::vector<int> peak_in_flight;       // per rank: activations of a stage and a micro-batch held at once
  std::vector<std::int64_t> peak_bytes;  // of these; empty without activation_bytes

  double mean_bubble_fraction() const;
};

/// Runs the schedule: every rank does its actions in order, each as soon as the rank is free and its inputs are there.
/// A forward reads the forward of the stage before; a backward or an input gradient reads its own forward and the
/// gradient of the stage after; weight gradients read their own input gradient. An activation is held from the start
/// of its forward to the end of its backward or weight gradients.
/// Throws Error if ranks wait for each other for ever, naming what each of them waits for; for stages and micro-batches
/// that do not exist; and for costs that are not above 0 (communication: below 0).
PipelineTiming simulate(const PipelineSchedule& schedule, const PipelineCosts& costs = {});

/// Throws Error, naming rank and pass, unless the schedule is complete (one forward and one backward of every
/// micro-batch in every stage, the backward whole or as its two halves), every pass is on its stage's rank, halves are
/// in order, what overlaps may, and the schedule runs to its end (simulate). With max_in_flight, also if a rank holds
/// more activations at once.
void check(const PipelineSchedule& schedule, std::optional<int> max_in_flight = {});

}  // namespace tessera
