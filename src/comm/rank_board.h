// What the ranks of a node are doing, in memory that all of them see: for the message that a run ends with when one of
// them has died or hangs.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/transport.h"

namespace tessera {

class RankBoard {
 public:
  /// Together with all ranks of `world`.
  explicit RankBoard(Transport& world);
  ~RankBoard();

  /// Of this node.
  int num_ranks() const { return node_->size(); }
  /// This rank among them.
  int rank() const { return node_->rank(); }
  /// The first of them, by its rank in `world`; -1 if it has not come yet.
  int first_rank() const;

  // Of this rank.
  void set_step(std::int64_t step);
  /// What it does from now on, up to 95 bytes of it.
  void set_operation(std::string_view name);
  /// That it waits for other ranks in this operation. To be repeated while it does, several times a second.
  void set_waiting();

  /// True once on a node.
  bool take_report();

  /// A rank of this node whose process has ended.
  std::optional<int> find_dead() const;
  /// The same of the next rank alone: if every rank asks, each is looked at once.
  std::optional<int> find_dead_neighbour() const;
  /// Ranks of this node that do not say that they wait for others: they compute, or are stopped.
  std::vector<int> find_not_waiting() const;
  /// A line per rank of this node: "rank 3 (process 4711, is stopped): step 17, for 31.0 s in all-gather of layers.2".
  std::string describe() const;

 private:
  struct Entry;
  const Entry& entry(int node_rank) const;
  bool is_dead(const Entry& its) const;

  std::unique_ptr<Transport> node_;
  std::unique_ptr<SymmetricWindow> window_;
  Entry* own_;
};

}  // namespace tessera
