#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "app/cli/engine_options.h"

namespace tessera {

struct ClusterDoctorOptions {
  EngineOptions engine;
  int ranks_per_node = 1;                           // ranks that are started once on each node
  std::vector<std::filesystem::path> folders = {};  // folders that all nodes should share
};

/// Asks all nodes of the engine for their facts, starts ranks on them, and prints what does not fit. Returns 1 if
/// something will keep a run from starting.
int examine_cluster(const ClusterDoctorOptions& options);

/// Prints what a node answers, as a line of JSON.
void print_node_facts(const std::vector<std::filesystem::path>& folders, const std::string& token);

/// Waits until all ranks have arrived, and ends. It runs on each of the started ranks.
void meet_ranks();

}  // namespace tessera
