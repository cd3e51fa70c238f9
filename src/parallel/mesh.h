// The mesh: each rank is a point in a space whose axes are the kinds of parallelism. Process groups run along the axes.
//
// Rank = (((pp · dp_replicate + r) · dp_shard + s) · cp + c) · tp + t. Ranks of one tensor-parallel group are next to
// each other and ranks of one pipeline are far apart, as in TorchTitan. Expert-parallel groups are cut out of the
// dp_shard · cp · tp ranks of a stage and replica. ep neighbours hold the E experts, E / ep each, and every ep-th rank
// holds the same experts.
//
// All ranks of a stage have different tokens: dp_replicate and dp_shard have different sequences, cp different parts of
// them, and tp different parts of those (sequence parallelism). So a parameter that tensor parallelism does not cut has
// its gradient summed over tp, too, and its shards are spread over tp, too.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "comm/process_group.h"
#include "parallel/mesh_degrees.h"

namespace tessera {

/// Throws Error unless `degree`, the value of `key`, divides `total`, which `what` describes ("the 8 ranks"). The
/// message names the nearest divisors. `others` is a second number that these divisors must divide. 0 allows any.
void require_divides(std::string_view key, std::int64_t degree, std::int64_t total, std::string_view what,
                     std::int64_t others = 0);

/// Holds the coordinates of a rank.
struct MeshPlace {
  std::int64_t pp = 0, dp_replicate = 0, dp_shard = 0, cp = 0, tp = 0;
  std::int64_t ep = 0;        // which experts it has
  std::int64_t ep_shard = 0;  // its place among the ranks with the same experts
};
MeshPlace place_of(const MeshDegrees& resolved, std::int64_t rank);

/// Returns the ranks of the group of `rank` that has this axis (ProcessGroup::axis), in order. Throws InternalError if
/// no group has it.
std::vector<std::int64_t> ranks_of_group(const MeshDegrees& resolved, std::int64_t rank, std::string_view axis);

struct Mesh {
  /// Makes the mesh of one rank.
  Mesh() = default;
  /// Makes the groups of a mesh. All ranks of `the_world`, which must outlive it, must call it together.
  Mesh(ProcessGroup& the_world, const MeshDegrees& resolved);
  /// Returns the mesh that rank `rank` would have in a run that does not exist. Its groups have sizes and this rank's
  /// places in them, which is enough to measure a step. They cannot communicate.
  static Mesh planned(const MeshDegrees& resolved, std::int64_t rank);

  /// Notes transfers of tensors without numbers in `record` from here on, or no longer if it is null.
  void set_record(StepRecord* record);

  MeshDegrees degrees{.dp_shard = 1};
  MeshPlace place;
  bool is_planned = false;  // made by planned(): the groups cannot communicate

  // Groups along one axis.
  ProcessGroup pp, dp_replicate, cp, tp, ep;
  // With several domains, ep_within has the ranks of ep in this rank's domain, and ep_across those with its place in
  // each domain.
  ProcessGroup ep_within, ep_across;
  /// The ranks with parts of the same sequences: cp · tp.
  ProcessGroup sequence;
  /// The ranks of a stage, which together have all its tokens: dp_replicate · dp_shard · cp · tp.
  ProcessGroup tokens;
  // The ranks over which a parameter's shards are spread. They are dp_shard · cp for parameters that tp cuts, and
  // dp_shard · cp · tp for those that it does not cut. For experts they are every ep-th rank of the latter.
  ProcessGroup shard_of_cut, shard_of_whole, shard_of_experts;
  /// The ranks along all axes except dp_replicate. Each number of the model is on one of these ranks, in shards.
  ProcessGroup model;

  std::int64_t num_ranks() const { return degrees.num_ranks(); }
  /// Returns this rank's number, whose place_of() is `place`.
  std::int64_t rank() const {
    return (((place.pp * degrees.dp_replicate + place.dp_replicate) * degrees.dp_shard + place.dp_shard) * degrees.cp +
            place.cp) *
               degrees.tp +
           place.tp;
  }
  /// Returns the number of this rank's data rank. Ranks with parts of the same sequences are one data rank.
  std::int64_t data_rank() const { return place.dp_replicate * degrees.dp_shard + place.dp_shard; }
  /// Returns the number of data ranks, which have different sequences.
  std::int64_t num_data_ranks() const { return degrees.dp_replicate * degrees.dp_shard; }
};

}  // namespace tessera
