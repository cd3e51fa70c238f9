// What the nodes of a cluster reached in their active checks: a file per node in a folder that all of them see. A node
// is judged by its peers, so nobody has to know what a healthy one reaches.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

namespace tessera {

struct ActiveRates {
  std::string processor = {};  // what the check ran on; nodes with another one are no peers
  double gemm_tflops = 0.0, copy_gb_per_s = 0.0;
};

/// Replaces what the node wrote before. Throws Error if the folder cannot be written to.
void write_rates(const std::filesystem::path& folder, const std::string& node, const ActiveRates& rates);

/// Medians over the peers of `node` with the same processor; none if there are fewer than two. Files that are damaged
/// count not.
std::optional<ActiveRates> find_peer_rates(const std::filesystem::path& folder, const std::string& node,
                                           const std::string& processor);

}  // namespace tessera
