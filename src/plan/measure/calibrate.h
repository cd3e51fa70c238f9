// Measures how fast this machine's CPU or GPU executes operators, within steps of small models, where caches, threads
// and clocks are as in training.
#pragma once

#include <functional>
#include <vector>

#include "comm/process_group.h"
#include "config/job_config.h"
#include "plan/calibration.h"

namespace tessera {

/// Returns the models that are trained. Between them they have every class of operators that a step of one rank may
/// have.
std::vector<JobConfig> calibration_models(Device device);
/// Returns the models that ranks on CPUs train together. They have the classes of operators that a step of one rank
/// does not have: those of the standard backend's tables, and a pipeline's copies.
std::vector<JobConfig> calibration_models_of_ranks(std::int64_t num_ranks);

struct CalibrateOptions {
  Device device = Device::kCpu;   // or kCuda
  int steps = 3;                  // timed per model and round
  int rounds = 3;                 // of all models: a slow moment of the machine then meets all of them
  ProcessGroup* world = nullptr;  // the ranks that calibrate together, on CPUs
  /// Is called before each model of each round, with how many are done and how many there are.
  std::function<void(std::size_t done, std::size_t count)> progress;
};

/// Returns the day: year-month-day.
std::string today();

/// Trains the calibration's models for a few steps, times every operator, and fits the rates to the medians.
Calibration calibrate(const CalibrateOptions& options);

}  // namespace tessera
