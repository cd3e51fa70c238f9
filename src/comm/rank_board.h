// The board shows what each rank of a node does, in memory that all of them see. When a rank has died or hangs, the
// run's last message quotes it. With job.node_folder the entries are in files that a monitor can read, too
// (comm/observe/rank_file.h).
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/file.h"
#include "comm/observe/rank_file.h"
#include "comm/transport/transport.h"

namespace tessera {

class RankBoard {
 public:
  /// Opens the board. All ranks of `world` must call it together. `file` is this rank's file. If it is null, the rank's
  /// entry is in memory that the node shares.
  explicit RankBoard(Transport& world, std::unique_ptr<RankFile> file = nullptr);
  /// Opens the board of a run with one rank.
  explicit RankBoard(std::unique_ptr<RankFile> file);
  ~RankBoard();

  /// Returns the number of ranks on this node.
  int num_ranks() const { return static_cast<int>(entries_.size()); }
  /// Returns how many ranks of this node are threads of this process.
  int num_in_process() const;
  /// Returns this rank's place among the node's ranks.
  int rank() const { return rank_; }
  /// Returns the rank in `world` of the node's first rank.
  int first_rank() const;

  // The functions below set the entry of this rank. After set_end(), sections count no more.
  /// Begins a step, which is a new section.
  void set_step(std::int64_t step);
  void set_section(Section section);
  /// Sets the operation that this rank begins, and ends its wait. Up to 95 bytes of the name are kept.
  void set_operation(std::string_view name);
  /// Records that this rank waits for others in this operation. Call it several times a second while it does.
  void set_waiting();
  /// Sets the event of the flight recorder that this rank waits for. 0 means that it is not recorded.
  void set_awaited(std::uint64_t event);
  /// Records that this process did not run between these times (monotonic_ns()).
  void set_stopped(std::int64_t from_ns, std::int64_t until_ns);
  /// Records how this rank will end. Only the first call counts.
  void set_end(int exit_status, std::string_view message);
  /// Returns this rank's recorder. It records nothing if the rank has no file.
  FlightRecorder& recorder() { return recorder_; }

  /// Returns true to the first caller on a node only. That rank reports a failure that all ranks see.
  bool take_report();

  /// Checks a few ranks of the node, and the next few at the next call. Returns one whose process has ended, or
  /// nullopt. Looking at a process takes a call of the system, and all ranks of the node look while they wait.
  std::optional<int> find_dead();
  /// Checks only the next rank of the node. If every rank calls this, each is checked once.
  std::optional<int> find_dead_neighbour() const;
  /// Returns the ranks of this node that have not reported lately that they wait for others. They compute, or are
  /// stopped.
  std::vector<int> find_not_waiting() const;
  /// Returns a line per rank of this node: "rank 3 (process 4711, is stopped): step 17, for 31.0 s in all-gather of
  /// layers.2".
  std::string describe() const;

 private:
  struct Shared;
  static bool is_dead(const RankEntry& entry);

  std::unique_ptr<RankFile> file_;
  std::unique_ptr<Transport> node_;          // null in a run of one rank
  std::unique_ptr<SymmetricWindow> window_;  // holds a Shared per rank; null in a run of one rank
  std::vector<MappedFile> files_;            // files of the other ranks of the node
  std::vector<const RankEntry*> entries_;
  RankEntry* own_;
  int rank_ = 0;
  std::atomic<std::size_t> next_to_check_{0};  // entry
  FlightRecorder recorder_;
};

}  // namespace tessera
