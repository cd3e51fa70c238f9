// The number of ranks that each axis of the mesh has (docs/parallelism.md).
#pragma once

#include <cstdint>
#include <string>

namespace tessera {

/// Holds the degrees of the axes. [parallelism] has them as data_parallel_replicate_degree and so on.
struct MeshDegrees {
  std::int64_t dp_replicate = 1;
  std::int64_t dp_shard = -1;  // -1: the number that the other axes leave
  std::int64_t cp = 1, tp = 1, pp = 1, ep = 1;
  std::int64_t ep_domain = 0;  // expert_parallel_ranks_per_domain: ep neighbours that reach each other's memory; 0: all

  /// Returns the number of ranks. Must be called after resolve().
  std::int64_t num_ranks() const { return dp_replicate * dp_shard * cp * tp * pp; }
  std::int64_t num_ep_domains() const { return ep_domain == 0 ? 1 : ep / ep_domain; }
  bool operator==(const MeshDegrees&) const = default;
};

/// Returns the degrees with dp_shard as a number. Throws Error if the degrees do not multiply to `num_ranks`, or if ep
/// does not divide dp_shard · cp · tp. Also throws it if ep_domain does not divide ep, or is 1 although ep is more. The
/// error names the key and its nearest possible values.
MeshDegrees resolve(MeshDegrees degrees, std::int64_t num_ranks);

/// Returns the smallest number of ranks on which `degrees` resolve. With dp_shard = -1 every multiple of the result
/// works, too. If the result does not fit into 64 bits, it returns the largest number that does. It returns 1 if a
/// degree is below 1, which resolve() refuses on any number of ranks.
std::int64_t fewest_ranks(const MeshDegrees& degrees);

/// Describes the degrees: "pipeline 1 x replicate 2 x shard 4 x context 1 x tensor 1, expert 4". With several domains
/// the text ends in "expert 4 in domains of 2".
std::string describe(const MeshDegrees& resolved);

}  // namespace tessera
