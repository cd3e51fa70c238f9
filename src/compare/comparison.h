// Holds all the numbers of a report. Its curves are smoothed and thinned out, ready to be drawn.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "compare/curve.h"
#include "compare/side.h"
#include "compare/verdict.h"

namespace tessera {

inline constexpr std::size_t kMaxWorstSites = 8;
inline constexpr std::size_t kMaxSides = 6;  // as many kinds of lines as people can tell apart

struct Spread {
  double mean = 0.0, deviation = 0.0;  // over the seeds; the deviation is NaN with one seed
};

struct WorstSite {
  std::string site;
  SqnrByOperand sqnr;  // in dB; mean over the seeds
};

struct SideResult {
  std::string label;
  std::optional<Verdict> verdict;   // not set for the baseline
  bool same_configuration = false;  // same as the baseline's, except for seeds, folders, program and machine

  Learned learned;                        // means over the seeds
  Spread final_loss;                      // each seed's mean over the last tenth of the steps
  std::optional<Spread> validation_loss;  // at the last step; set if every run of every side has it on the same data
  double tokens_per_second = 0.0;         // median of the logged lines
  double peak_memory_bytes = 0.0;

  Curve loss, grad_norm;  // mean over the seeds; the band is from the lowest to the highest seed
  Curve validation;       // validation loss, at the steps where every run of the side has one; may be empty
  Curve difference;       // relative to the baseline; the band is the confidence interval. Empty for the baseline
  std::map<std::string, Curve> sqnr;           // by operand, over the steps: median, lowest and highest layer, dB
  std::map<std::string, Curve> sqnr_by_layer;  // by operand, at the last measurement; x is the layer
  std::vector<WorstSite> worst_sites;          // lowest first, at the last measurement
};

struct RunSummary {
  std::string side;
  std::int64_t seed = 0;
  std::string folder, program, processor;
  std::int64_t threads = 0;
  Learned learned;
  double tokens_per_second = 0.0;
};

struct Comparison {
  double margin = 0.0;
  std::int64_t num_steps = 0, num_seeds = 0;
  std::int64_t num_lines = 0,
               smoothing_lines = 0;  // logged steps that all unbroken sides have; width of the moving average
  std::vector<SideResult> sides;     // the first is the baseline
  std::vector<Difference> differences;
  std::vector<RunSummary> runs;
  std::string command;  // the command that made the comparison; empty if unknown
};

/// Sets the side's curves of quantization errors. There are none without low precision.
void add_sqnr_curves(const Side& side, SideResult& result);

/// Checks that the sides may be compared, and compares each of them with the first. Throws Error.
Comparison compare_sides(const std::vector<Side>& sides, double margin);

}  // namespace tessera
