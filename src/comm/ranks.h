// The ranks of a run as one rank sees them: the group of all ranks, the timeout of waits, and the way a run ends.
#pragma once

#include <memory>
#include <string_view>

#include "comm/observe/rank_file.h"
#include "comm/process_group.h"

namespace tessera {

class Ranks {
 public:
  /// Makes a run of one rank. The rank records what it does in `file`. If it is null, it records nothing.
  explicit Ranks(std::unique_ptr<RankFile> file = nullptr);
  /// Makes a run of all ranks of `world`, which must call this together. `timeout` is for every operation between ranks
  /// (comm.init_timeout_seconds).
  Ranks(std::unique_ptr<Transport> world, Progress::Seconds timeout, std::unique_ptr<RankFile> file = nullptr);

  ProcessGroup& world() { return world_; }
  int rank() const { return world_.rank(); }
  int size() const { return world_.size(); }
  /// Returns the number of ranks on this node.
  int num_on_node() const { return board_ == nullptr ? 1 : board_->num_ranks(); }
  /// Returns how many ranks are threads of this process.
  int num_in_process() const { return board_ == nullptr ? 1 : board_->num_in_process(); }
  /// Returns this rank's place among the node's ranks.
  int rank_on_node() const { return board_ == nullptr ? 0 : board_->rank(); }

  /// Sets the timeout of operations. `key` is its key in the configuration, for messages.
  void set_timeout(Progress::Seconds timeout, std::string key);
  /// Sets the function that ends the run after a failure (Progress::set_failure_handler).
  void set_failure_handler(std::function<void(const std::exception&)> failure_handler);
  /// Returns what body() returns. If body() throws, it calls the failure handler before the caller's objects are
  /// destroyed. Destroying them might wait for a GPU, for other ranks, or for storage that hangs.
  template <typename Body>
  auto end_where_it_fails(Body&& body) -> decltype(body()) {
    try {
      return body();
    } catch (const std::exception& error) {
      if (progress_ != nullptr) progress_->call_failure_handler(error);
      throw;
    }
  }
  // The functions below record what this rank does, for messages about a rank that hangs or has died and for a monitor
  // (RankFile).
  /// Begins a step.
  void set_step(std::int64_t step);
  void set_section(Section section);
  /// Records how this rank will end. Only the first call counts.
  void set_end(ExitStatus status, std::string_view message);
  /// Returns true to the first rank of a node that asks. That rank reports a failure that many ranks see.
  bool may_report();
  /// Returns whether this rank is on the node of rank 0.
  bool on_first_node() const { return board_ == nullptr || board_->first_rank() == 0; }
  /// Returns the first rank on each rank's node, indexed by rank. All ranks must call it.
  std::vector<int> first_ranks_on_nodes();

  /// Throws Error unless `text` is the same on all ranks. The message names the first rank that differs from rank 0,
  /// and `what`, which says what the text is.
  void require_same(std::string_view text, std::string_view what);

 private:
  std::unique_ptr<RankBoard> board_;
  std::unique_ptr<Progress> progress_;
  ProcessGroup world_;
};

}  // namespace tessera
