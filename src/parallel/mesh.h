// The mesh: ranks as points of a space whose axes are the kinds of parallelism, and the process groups along them.
//
// Rank = (((pp · dp_replicate + r) · dp_shard + s) · cp + c) · tp + t: ranks of one tensor-parallel group are next to
// each other, ranks of one pipeline far apart, as in TorchTitan. Expert ranks are cut out of the data ranks: within the
// dp_shard · cp · tp ranks of a stage and replica, ep neighbours hold the E experts, E / ep each, and every ep-th rank
// the same ones.
//
// Tokens differ between all ranks of a stage: dp_replicate and dp_shard have other sequences, cp other parts of them,
// tp other parts of those (sequence parallelism). So the gradient of a parameter that tensor parallelism does not cut
// is the sum over tp as well, and its shards are spread over tp as well.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "comm/process_group.h"
#include "parallel/mesh_degrees.h"

namespace tessera {

/// Throws Error unless `degree`, a key's value, divides `total`, which `what` describes ("the 8 ranks"); names the
/// nearest divisors. `others`: what else the degree has to divide, so that these will do; 0: any number.
void require_divides(std::string_view key, std::int64_t degree, std::int64_t total, std::string_view what,
                     std::int64_t others = 0);

/// A rank's coordinates.
struct MeshPlace {
  std::int64_t pp = 0, dp_replicate = 0, dp_shard = 0, cp = 0, tp = 0;
  std::int64_t ep = 0;        // which experts it has
  std::int64_t ep_shard = 0;  // among the ranks that have the same
};
MeshPlace place_of(const MeshDegrees& resolved, std::int64_t rank);

struct Mesh {
  /// One rank.
  Mesh() = default;
  /// Makes the groups of a mesh. All ranks of `the_world`, which must outlive it, must call it together.
  Mesh(ProcessGroup& the_world, const MeshDegrees& resolved);
  /// Returns the mesh that rank `rank` would have in a run that does not exist. Its groups know their sizes and this
  /// rank's places, which is enough to measure a step. They cannot communicate.
  static Mesh planned(const MeshDegrees& resolved, std::int64_t rank);

  MeshDegrees degrees{.dp_shard = 1};
  MeshPlace place;
  bool is_planned = false;  // only

  // One axis each.
  ProcessGroup pp, dp_replicate, cp, tp, ep;
  // With several domains: the ranks of ep in this rank's domain, and the ranks with its place in each domain.
  ProcessGroup ep_within, ep_across;
  /// cp · tp: the ranks with parts of the same sequences.
  ProcessGroup sequence;
  /// dp_replicate · dp_shard · cp · tp: a stage's ranks; all its tokens.
  ProcessGroup tokens;
  // The ranks over which a parameter's shards are spread: dp_shard · cp of what tp cuts, dp_shard · cp · tp of what it
  // does not, and every ep-th of these for experts.
  ProcessGroup shard_of_cut, shard_of_whole, shard_of_experts;
  /// All but dp_replicate: every number of the model is on one of these ranks, in shards.
  ProcessGroup model;

  std::int64_t num_ranks() const { return degrees.num_ranks(); }
  /// Which of the data ranks' sequences this rank has, of how many.
  std::int64_t data_rank() const { return place.dp_replicate * degrees.dp_shard + place.dp_shard; }
  std::int64_t num_data_ranks() const { return degrees.dp_replicate * degrees.dp_shard; }
};

}  // namespace tessera
