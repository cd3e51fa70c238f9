// The rates that the nodes of a cluster reached in their active checks. Each node has a file in a folder that all of
// them see. A node is judged by its peers, so nobody has to know what a healthy node reaches.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

namespace tessera {

struct ActiveRates {
  std::string processor = {};  // what the check ran on; nodes with another one are not peers
  double gemm_tflops = 0.0, copy_gb_per_s = 0.0;
};

/// Writes the node's rates in place of earlier ones. Throws Error if the folder cannot be written to.
void write_rates(const std::filesystem::path& folder, const std::string& node, const ActiveRates& rates);

/// Returns the medians over the peers of `node` with the same processor, or nullopt if there are fewer than two. It
/// ignores damaged files.
std::optional<ActiveRates> find_peer_rates(const std::filesystem::path& folder, const std::string& node,
                                           const std::string& processor);

}  // namespace tessera
