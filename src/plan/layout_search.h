// Finds the layouts of a run on a cluster that fit its GPUs, and how fast they are. Each one is planned and timed in
// full (plan/run_forecast.h): no formula stands for a layout.
#pragma once

#include <string>
#include <vector>

#include "plan/precision_choice.h"
#include "plan/run_forecast.h"

namespace tessera {

struct LayoutSearch {
  const JobConfig& job;  // what is not searched stays as it is here
  std::int64_t num_ranks = 1;
  const Cluster& cluster;
  Routing routing = RoutingKind::kUniform;
  std::vector<std::string> precisions = {};   // names for in_precision(); empty: the job's own
  std::vector<double> capacity_factors = {};  // of expert_parallel_capacity_factor; empty: the job's own
  int num_shown = 0;              // the fastest so many get FoundLayout::most_room_bytes, as does the frontier
  Device device = Device::kCuda;  // whose operators are planned
  int num_threads = 1;
};

struct FoundLayout {
  JobConfig config;  // with the least capacity factor, or with the largest one that fits if most_room_bytes is not 0
  double tokens_per_second_per_gpu = 0.0;
  double memory_bytes = 0.0;     // with the least factor: of the rank that takes most, with Cluster::reserved_bytes
  double most_room_bytes = 0.0;  // the same with the largest factor that fits
  double bubble = 0.0;           // of the slowest rank, as a part of the step
};

struct FoundLayouts {
  std::vector<FoundLayout> fitting;  // the fastest first
  std::size_t num_too_large = 0;     // layouts that were planned, and do not fit
};

/// Searches the degrees of tensor, pipeline and expert parallelism: all that divide the ranks, and for experts
/// also their number. Tensor parallelism stays within a domain. First all degrees are planned with 1F1B, full
/// recomputation and micro-batches of one sequence, which take least memory, in the first precision. The twelve fastest
/// of these are then planned with all schedules, modes and micro-batches of 1, 2 and 4 sequences, in the precision that
/// is fastest for the fastest degrees. At last the other precisions are planned in the same way, for the degrees and
/// micro-batches that were the six fastest. Modes that take more memory are left out where one that takes less does not
/// fit. Weights are quantized for each pass (quantize.keep_weights) where a layout does not fit otherwise. Plans have
/// the least capacity factor: a larger one takes more memory, and the same time. With recorded loads it is the least
/// one with room for them. All layouts have job's sequences per step. Throws Error if no layout is possible at all.
FoundLayouts search_layouts(const LayoutSearch& search);

/// The titles of a table of layouts. Memory is with the least capacity factor.
inline constexpr const char* kLayoutTitles[] = {"pp",     "tp",       "ep",        "dp",
                                                "batch",  "schedule", "recompute", "precision",
                                                "bubble", "memory",   "capacity",  "tokens/s per GPU"};
/// Returns "2.5", or "any load" for 0.
std::string capacity_text(double factor);
/// Returns the texts of a layout's row. A * behind a precision says that weights are quantized for each pass. "2.5:
/// 105.55GiB" are the largest capacity factor that fits and the memory with it, "-" says that it was not searched.
std::vector<std::string> layout_row(const FoundLayout& layout, std::int64_t num_ranks);

/// Orders capacity factors by the room that they give. 0 stands for any load.
bool gives_less_room(double a, double b);

/// Says how much faster a run would be if something of the cluster were better.
struct Sensitivity {
  std::string change;  // "products 10 % faster"
  double gain = 0.0;   // in tokens per second, as a part
};

/// Returns the gains of a run, the largest first.
std::vector<Sensitivity> sensitivities(const PlannedRun& run, const Cluster& cluster, const Routing& routing);

/// Returns the layouts that no other one beats in both speed and memory, the fastest first.
std::vector<FoundLayout> frontier(const std::vector<FoundLayout>& fastest_first);

}  // namespace tessera
