// Another training engine as data: how its step differs from ours. Files in engines/ hold what was read in other
// projects' code and pages. It was not run. docs/planner.md describes the keys.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "model/config.h"

namespace tessera {

struct Cluster;

struct OtherEngine {
  /// Says that operators or transfers take so many times as long as ours.
  struct Factor {
    std::vector<std::string> names;  // in which * stands for any text
    std::string pass;                // "backward"; empty: any
    double times = 1.0;
  };

  std::string name;    // empty: Tessera
  std::string source;  // of all values
  std::vector<Factor> factors;
  double dispatch_overlap_cost = -1.0;  // StepTimes::dispatch_overlap_cost; below 0: ours
  bool overlaps_micro_batches = false;  // a dispatcher's calls run beside the operators of another micro-batch
  double host_seconds = 0.0;            // what the host needs for an operator: a pass takes at least that for each
  // The bytes that this engine moves and ours does not, for each number of a row that an expert gets: in the forward
  // and in the backward. They move at row_rate times the rate of a copy.
  double row_bytes_forward = 0.0, row_bytes_backward = 0.0, row_rate = 1.0;
  std::int64_t dim = 0, moe_inter_dim = 0;  // of those rows, and of the experts
  /// The same for each number that is added to a gradient of experts' weights. These bytes move at a copy's rate.
  double expert_gradient_bytes = 0.0;

  /// Returns how many times as long as ours an operator or transfer of a pass takes.
  double factor_of(const std::string& name_of_operator, std::string_view pass) const;
};

/// Reads an engine, and lets `cluster` execute its steps of the model. Warns if the engine has rates of operators for
/// other clusters only. Throws Error, which names the file and the key, if something is missing, has no source, or is
/// no number in range.
void use_engine(const std::filesystem::path& path, const ModelConfig& model, Cluster& cluster);

}  // namespace tessera
