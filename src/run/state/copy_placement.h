// Decides which nodes keep whose copy of the training state in memory.
//
// Every state is on two nodes, if there are two. One is the node of its rank. The other is that of another replica or
// of a partner. Ranks on one node with the same state keep one copy of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tessera {

class CopyPlacement {
 public:
  struct Rank {
    std::uint64_t node = 0;       // identifies the node
    std::int64_t shard = 0;       // ranks with the same shard have the same state
    std::size_t state_bytes = 0;  // size of the state
    bool keeps = false;           // the rank stores its own state on its node
    int partner = -1;             // rank on another node that stores the state, too; -1: a replica does, or no rank
  };

  /// `ranks` are all ranks in order, without `keeps` and `partner`, which the constructor finds. `own_rank` is this
  /// one.
  CopyPlacement(std::vector<Rank> ranks, int own_rank);

  const Rank& of(int rank) const { return ranks_[static_cast<std::size_t>(rank)]; }
  const Rank& own() const { return of(own_rank_); }
  int num_nodes() const { return num_nodes_; }
  /// Returns the ranks whose partner this rank is.
  const std::vector<int>& sources() const { return sources_; }
  /// Returns the ranks on this rank's node, in order, with this rank.
  std::vector<int> neighbours() const;
  /// Returns the ranks whose states are kept on this rank's node, each once per copy.
  std::vector<int> owners_on_node() const;

 private:
  std::vector<Rank> ranks_;
  int own_rank_, num_nodes_ = 1;
  std::vector<int> sources_;
};

}  // namespace tessera
