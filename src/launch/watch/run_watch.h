// Finds out from what monitors report whether something is wrong with a run. It only looks: times come from outside, so
// that tests need not wait.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "launch/watch/failure.h"

namespace tessera {

/// What a monitor says of one rank.
struct RankReport {
  int rank = 0;
  bool is_ended = false, is_stopped = false;  // its process
  std::int64_t first_step = 0, step = 0;
  std::string section;
  double section_seconds = 0.0;  // since it began
  std::string operation;
  bool is_waiting = false;
  double idle_seconds = 0.0;            // in which it computed no step, in all
  std::optional<int> exit_status = {};  // as it said before it ended
  std::string end_message = {};
};

struct WatchOptions {
  double node_timeout = 4.0;         // seconds of silence after which a node counts as lost
  double hang_floor = 5.0;           // seconds in a step that are no hang, however short steps are
  double other_timeout = 100.0;      // seconds in a section whose usual length is not known: comm.train_timeout_seconds
  double start_timeout = 300.0;      // seconds until all ranks have come: comm.init_timeout_seconds
  double stopped_seconds = 2.0;      // a process may be stopped so long
  double slow_factor = 1.5;          // a rank that computes so much longer than the median of the others is slow
  double slow_seconds = 0.1;         // and by so much per step
  std::int64_t slow_window = 6;      // steps; in two windows one after the other
  double slow_window_seconds = 2.0;  // a window is so long at least: a busy core makes ranks differ for a moment
};

class RunWatch {
 public:
  /// `nodes`: in the order of ranks, of which each has `ranks_per_node`. `now`: seconds on a clock that only goes on.
  RunWatch(const WatchOptions& options, std::vector<std::string> nodes, int ranks_per_node, double now);

  /// What a node's monitor said at `now`.
  void report(const std::string& node, const std::vector<RankReport>& ranks, double now);
  /// The connection to the node's monitor has ended.
  void lose(const std::string& node, const std::string& how);

  /// What is wrong, if something is. To be asked several times a second: a longer gap without a question and a report
  /// counts as time for which this process was suspended, together with everything that it watches.
  std::optional<Failure> find(double now);

  /// The step that all ranks have reached; 0: not all train yet.
  std::int64_t step() const;
  /// The first step of this attempt; 0: not all train yet.
  std::int64_t first_step() const { return step() == 0 ? 0 : ranks_.begin()->second.report.first_step; }
  /// Median of the last steps; 0 if none is known.
  double step_seconds() const;
  bool all_ended() const;
  /// Whether every rank has ended, having said that all is done or that a signal asked it to stop.
  bool all_ended_as_asked() const;
  const std::string& node_of(int rank) const {
    return nodes_[static_cast<std::size_t>(rank) / static_cast<std::size_t>(ranks_per_node_)];
  }
  /// The last report of a rank; null if there is none.
  const RankReport* find_rank(int rank) const;

 private:
  struct Node {
    double seen = 0.0;
    std::optional<std::string> lost;
  };
  struct Rank {
    RankReport report;
    double reported = 0.0;
    std::optional<double> stopped_since;          // in the same step, while not all ranks were stopped
    double suspended_seconds = 0.0;               // of its section, in which the whole run was suspended
    double window_time = 0.0, window_idle = 0.0;  // when the window of steps began: of its report
    double compute_per_step = 0.0;                // in the last window
    int slow_windows = 0;                         // one after the other
  };

  /// Leaves the time since the last look out of all limits if the whole run was suspended meanwhile.
  void look(double now);
  bool all_stopped() const;
  std::optional<Failure> find_lost_node(double now) const;
  std::optional<Failure> find_ended() const;
  std::optional<Failure> find_stopped(double now) const;
  std::optional<Failure> find_late(double now) const;
  std::optional<Failure> find_slow(double now);
  std::optional<Failure> compare_ranks();
  void note_steps(double now);
  std::size_t world_size() const { return nodes_.size() * static_cast<std::size_t>(ranks_per_node_); }

  WatchOptions options_;
  std::vector<std::string> nodes_;
  int ranks_per_node_;
  double begin_, looked_;
  std::map<std::string, Node> node_states_;
  std::map<int, Rank> ranks_;
  std::int64_t step_ = 0;
  double step_time_ = 0.0;
  std::int64_t window_step_ = 0;  // at which the window began that ranks are compared over; 0: none has
  double window_time_ = 0.0;
  std::deque<double> step_seconds_;  // of the last steps
};

}  // namespace tessera
