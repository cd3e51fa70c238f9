// Operations on small data, in which each of P ranks sends and receives O(log P) messages. A step of a large world
// would otherwise send P² of them.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "comm/messages.h"

namespace tessera {

/// Gathers a part of the same size from every rank in ⌈log₂ P⌉ rounds (Bruck et al., IEEE TPDS 8(11), 1997). In round
/// k each rank passes on what it has to the rank 2ᵏ before it.
class GatherInRounds : public Exchange {
 public:
  /// Copies this rank's part, `own`.
  GatherInRounds(std::string name, Transport& transport, int tag, std::span<const std::byte> own);
  bool advance() override;
  /// Returns a rank's part. The operation must be complete.
  std::span<const std::byte> part(int rank) const;

 private:
  void start_round();

  Transport& transport_;
  int tag_;
  std::size_t part_bytes_;
  std::vector<std::byte> parts_;  // of this rank, the next one and so on
  std::size_t num_parts_ = 1;     // of parts_ that have arrived, or arrive in this round
};

/// Sends each rank a part of the same size in ⌈log₂ P⌉ rounds (the same paper). Part number i is on its way to the i-th
/// rank after its sender. In round k it goes on by 2ᵏ ranks if i has bit k. So a rank sends half of its parts in each
/// round. In all, it sends ½ · log₂ P times as many bytes as without rounds.
class ExchangeInRounds : public Exchange {
 public:
  /// Copies the parts `own`, of rank 0, 1 and so on.
  ExchangeInRounds(std::string name, Transport& transport, int tag, std::span<const std::byte> own);
  bool advance() override;
  /// Returns the part that a rank sent to this one. The operation must be complete.
  std::span<const std::byte> part_from(int rank) const;

 private:
  /// Calls body(part) for each part that moves in this round, in the same order on all ranks.
  template <typename Body>
  void for_moving_parts(const Body& body);
  void start_round();

  Transport& transport_;
  int tag_, distance_ = 1;
  std::size_t part_bytes_;
  std::vector<std::byte> parts_;            // part i goes to the i-th rank after its sender
  std::vector<std::byte> sent_, received_;  // the parts that move in this round
};

/// Copies the bytes of rank `root` to all ranks, along a binomial tree.
class TreeBroadcast : public Exchange {
 public:
  TreeBroadcast(std::string name, Transport& transport, int tag, int root, std::span<std::byte> data);
  bool advance() override;

 private:
  Transport& transport_;
  int tag_, root_;
  std::span<std::byte> data_;
  bool has_passed_on_ = false;
};

/// Replaces x by the sum of all ranks' x: up a binomial tree to rank 0, and down again. Each inner rank adds the sums
/// of its children to its own, so the order depends on the number of ranks only.
class TreeAllReduce : public Exchange {
 public:
  TreeAllReduce(std::string name, Transport& transport, int tag, std::span<double> x);
  bool advance() override;
  void find_missing(std::vector<int>& senders, std::vector<int>& receivers) const override {
    if (broadcast_) return broadcast_->find_missing(senders, receivers);
    Exchange::find_missing(senders, receivers);
  }

 private:
  Transport& transport_;
  int tag_;
  std::span<double> x_;
  std::vector<double> received_;  // the sums of this rank's children
  bool is_added_ = false;
  std::unique_ptr<TreeBroadcast> broadcast_;  // once this rank's sum has gone up
};

}  // namespace tessera
