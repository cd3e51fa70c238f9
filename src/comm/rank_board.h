// What the ranks of a node are doing, in memory that all of them see: for the message that a run ends with when one of
// them has died or hangs. With job.node_folder it is in files that a monitor reads, too (comm/observe/rank_file.h).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/file.h"
#include "comm/observe/rank_file.h"
#include "comm/transport.h"

namespace tessera {

class RankBoard {
 public:
  /// Opens the board. All ranks of `world` must call it together. `file`: this rank's; null keeps its entry in memory
  /// that the node shares.
  explicit RankBoard(Transport& world, std::unique_ptr<RankFile> file = nullptr);
  /// Opens the board of a run with one rank.
  explicit RankBoard(std::unique_ptr<RankFile> file);
  ~RankBoard();

  /// Returns the number of ranks on this node.
  int num_ranks() const { return static_cast<int>(entries_.size()); }
  /// Returns this rank's place among the node's ranks.
  int rank() const { return rank_; }
  /// Returns the rank in `world` of the node's first rank; -1 if it has not come yet.
  int first_rank() const;

  // Of this rank.
  /// Begins a step, and its section.
  void set_step(std::int64_t step);
  void set_section(Section section);
  /// Sets the operation that this rank begins, of which up to 95 bytes are kept. Ends a wait.
  void set_operation(std::string_view name);
  /// Notes that this rank waits for others in this operation. To be called several times a second while it does.
  void set_waiting();
  /// Sets the event of the flight recorder that this rank waits for; 0: no recorded one.
  void set_awaited(std::uint64_t event);
  /// Notes that this process did not run between these times (monotonic_ns()).
  void set_stopped(std::int64_t from_ns, std::int64_t until_ns);
  /// Records how this rank ends, before it does. The first call counts.
  void set_end(int exit_status, std::string_view message);
  /// Without a file it records nothing.
  FlightRecorder& recorder() { return recorder_; }

  /// Returns true once on a node, for whoever reports a failure that all ranks see.
  bool take_report();

  /// Returns a rank of this node whose process has ended.
  std::optional<int> find_dead() const;
  /// Looks at the next rank only. If every rank calls this, each is looked at once.
  std::optional<int> find_dead_neighbour() const;
  /// Returns the ranks of this node that do not say that they wait for others: they compute, or are stopped.
  std::vector<int> find_not_waiting() const;
  /// Returns a line per rank of this node: "rank 3 (process 4711, is stopped): step 17, for 31.0 s in all-gather of
  /// layers.2".
  std::string describe() const;

 private:
  struct Shared;
  static bool is_dead(const RankEntry& its);

  std::unique_ptr<RankFile> file_;
  std::unique_ptr<Transport> node_;          // null for the only rank
  std::unique_ptr<SymmetricWindow> window_;  // as node_: per rank a Shared
  std::vector<MappedFile> files_;            // of the node's other ranks
  std::vector<const RankEntry*> entries_;
  RankEntry* own_;
  int rank_ = 0;
  FlightRecorder recorder_;
};

}  // namespace tessera
