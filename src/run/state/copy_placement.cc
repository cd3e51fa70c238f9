#include "run/state/copy_placement.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

namespace tessera {

CopyPlacement::CopyPlacement(std::vector<Rank> ranks, int own_rank) : ranks_(std::move(ranks)), own_rank_(own_rank) {
  std::vector<std::uint64_t> nodes;                   // in the order of their first ranks
  std::map<std::uint64_t, std::vector<int>> on_node;  // the ranks of each node
  std::map<std::int64_t, std::set<std::uint64_t>> nodes_of_shard;
  for (int rank = 0; rank < static_cast<int>(ranks_.size()); ++rank) {
    Rank& place = ranks_[static_cast<std::size_t>(rank)];
    std::vector<int>& neighbours = on_node[place.node];
    if (neighbours.empty()) nodes.push_back(place.node);
    neighbours.push_back(rank);
    place.keeps = std::ranges::none_of(neighbours, [&](int other) {
      return other != rank && ranks_[static_cast<std::size_t>(other)].shard == place.shard;
    });
    nodes_of_shard[place.shard].insert(place.node);
  }
  num_nodes_ = static_cast<int>(nodes.size());
  if (num_nodes_ == 1) return;
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    const std::vector<int>& from = on_node[nodes[i]];
    const std::vector<int>& to = on_node[nodes[(i + 1) % nodes.size()]];
    for (std::size_t r = 0; r < from.size(); ++r) {
      Rank& place = ranks_[static_cast<std::size_t>(from[r])];
      if (!place.keeps || nodes_of_shard[place.shard].size() > 1) continue;
      place.partner = to[r % to.size()];
      if (place.partner == own_rank_) sources_.push_back(from[r]);
    }
  }
}

std::vector<int> CopyPlacement::neighbours() const {
  std::vector<int> found;
  for (int rank = 0; rank < static_cast<int>(ranks_.size()); ++rank) {
    if (of(rank).node == own().node) found.push_back(rank);
  }
  return found;
}

std::vector<int> CopyPlacement::owners_on_node() const {
  std::vector<int> found;
  for (int rank = 0; rank < static_cast<int>(ranks_.size()); ++rank) {
    for (const int keeper : {of(rank).keeps ? rank : -1, of(rank).partner}) {
      if (keeper >= 0 && of(keeper).node == own().node) found.push_back(rank);
    }
  }
  return found;
}

}  // namespace tessera
