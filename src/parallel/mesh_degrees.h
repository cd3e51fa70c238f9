// How many ranks each axis of the mesh has (docs/parallelism.md).
#pragma once

#include <cstdint>
#include <string>

namespace tessera {

/// Sizes of the axes; [parallelism] has them as data_parallel_replicate_degree and so on.
struct MeshDegrees {
  std::int64_t dp_replicate = 1;
  std::int64_t dp_shard = -1;  // -1: what the others leave
  std::int64_t cp = 1, tp = 1, pp = 1, ep = 1;
  std::int64_t ep_domain = 0;  // ep neighbours that reach each other's memory, expert_parallel_ranks_per_domain; 0: all

  /// Returns the number of ranks. Must be called after resolve().
  std::int64_t num_ranks() const { return dp_replicate * dp_shard * cp * tp * pp; }
  std::int64_t num_ep_domains() const { return ep_domain == 0 ? 1 : ep / ep_domain; }
};

/// With dp_shard as a number. Throws Error, naming the key and the nearest values that it can have, if the degrees do
/// not multiply to `num_ranks`, ep does not divide dp_shard · cp · tp, or ep_domain, which is not to be 1, does not
/// divide ep.
MeshDegrees resolve(MeshDegrees degrees, std::int64_t num_ranks);

/// The smallest number of ranks on which `degrees`, each 1 or more but for dp_shard = -1, resolve. Where dp_shard is
/// -1, every multiple of it will do as well. Numbers that are too large for 64 bits give the largest one.
std::int64_t fewest_ranks(const MeshDegrees& degrees);

/// "pipeline 1 x replicate 2 x shard 4 x context 1 x tensor 1, expert 4"; of several domains "expert 4 in domains of
/// 2".
std::string describe(const MeshDegrees& resolved);

}  // namespace tessera
