// The ranks of a run, from this one's side: the group of all, who waits for whom and how long, and how a run ends.
#pragma once

#include <memory>
#include <string_view>

#include "comm/observe/rank_file.h"
#include "comm/process_group.h"

namespace tessera {

class Ranks {
 public:
  /// One rank. `file`: where it says what it does; null: nowhere.
  explicit Ranks(std::unique_ptr<RankFile> file = nullptr);
  /// Together with all ranks of `world`. `timeout`: of every operation between ranks, comm.init_timeout_seconds.
  Ranks(std::unique_ptr<Transport> world, Progress::Seconds timeout, std::unique_ptr<RankFile> file = nullptr);

  ProcessGroup& world() { return world_; }
  int rank() const { return world_.rank(); }
  int size() const { return world_.size(); }
  /// Ranks on this rank's node.
  int num_on_node() const { return board_ == nullptr ? 1 : board_->num_ranks(); }
  /// Which of them this rank is.
  int rank_on_node() const { return board_ == nullptr ? 0 : board_->rank(); }

  /// `key`: of the configuration, for messages.
  void set_timeout(Progress::Seconds timeout, std::string key);
  /// As Progress::set_way_out().
  void set_way_out(std::function<void(const std::exception&)> way_out);
  /// What body() returns. If it throws, the way out is taken before anything of the caller's goes, which might wait for
  /// a GPU, for other ranks, or for storage that hangs.
  template <typename Body>
  auto end_where_it_fails(Body&& body) -> decltype(body()) {
    try {
      return body();
    } catch (const std::exception& error) {
      if (progress_ != nullptr) progress_->take_way_out(error);
      throw;
    }
  }
  // For what is told of a rank that hangs or has died, and for a monitor (RankFile).
  /// Begins a step.
  void set_step(std::int64_t step);
  void set_section(Section section);
  /// How this rank ends, before it does.
  void set_end(ExitStatus status, std::string_view message);
  /// True for the first rank of a node that asks: who tells of a failure that many ranks see.
  bool may_report();
  /// True on the node of rank 0.
  bool on_first_node() const { return board_ == nullptr || board_->first_rank() == 0; }
  /// Of every rank, the first rank on its node. Together with all ranks.
  std::vector<int> first_ranks_on_nodes();

  /// Throws Error, naming the first rank that differs, unless `text` is the same on all ranks. `what` is what it is.
  void require_same(std::string_view text, std::string_view what);

 private:
  std::unique_ptr<RankBoard> board_;
  std::unique_ptr<Progress> progress_;
  ProcessGroup world_;
};

}  // namespace tessera
