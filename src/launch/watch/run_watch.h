// Finds out from the reports of monitors whether something is wrong with a run. It only judges. Times are passed in, so
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

/// Holds what a monitor reports about one rank.
struct RankReport {
  int rank = 0;
  bool is_ended = false, is_stopped = false;  // state of its process
  std::int64_t first_step = 0, step = 0;
  std::string section;
  double section_seconds = 0.0;  // since the section began
  std::string operation;
  double operation_seconds = 0.0;       // since the operation began; each vote in a long section is one
  double idle_seconds = 0.0;            // total time in which it did not compute a step
  std::optional<int> exit_status = {};  // the status that it announced before it ended
  std::string end_message = {};
};

struct WatchOptions {
  double node_timeout = 4.0;  // seconds of silence after which a node is lost
  double hang_floor = 5.0;    // a step that is shorter than this many seconds is no hang
  /// comm.train_timeout_seconds: the limit for the first steps of an attempt, and for an operation of a validation or
  /// of a save that training waits for.
  double other_timeout = 100.0;
  /// comm.init_timeout_seconds: how long ranks may take to arrive, and then to begin with the load of their state. It
  /// is also the limit for an operation of that load.
  double start_timeout = 300.0;
  double stopped_seconds = 2.0;  // seconds that a process may be stopped
  double slow_factor = 1.5;      // a rank is slow if it computes this many times as long as the median of the others
  double slow_seconds = 0.1;     // a slow rank also computes this many seconds longer per step
  std::int64_t slow_window = 6;  // in steps; a rank must be slow in two consecutive windows
  double slow_window_seconds = 2.0;  // a window lasts at least this long: a busy core makes ranks differ for a moment
};

class RunWatch {
 public:
  /// `nodes` are in the order of ranks. Each has `ranks_per_node` ranks. `now` is in seconds on a monotonic clock.
  RunWatch(const WatchOptions& options, std::vector<std::string> nodes, int ranks_per_node, double now);

  /// Records what a node's monitor reported at `now`.
  void report(const std::string& node, const std::vector<RankReport>& ranks, double now);
  /// Records that the connection to the node's monitor has ended.
  void lose(const std::string& node, const std::string& how);

  /// Returns what is wrong, or nullopt. Call it several times a second. A longer gap without a call and without a
  /// report means that this process was suspended together with everything that it watches. That time does not count.
  std::optional<Failure> find(double now);

  /// Returns whether all ranks have announced that they have done what they should.
  bool are_done() const;
  /// Returns the step that all ranks have reached, or 0 if not all train yet.
  std::int64_t step() const;
  /// Returns the first step of this attempt, or 0 if not all ranks train yet.
  std::int64_t first_step() const { return step() == 0 ? 0 : ranks_.begin()->second.report.first_step; }
  /// Returns the median duration of the last steps, or 0 if none is known.
  double step_seconds() const;
  const std::string& node_of(int rank) const {
    return nodes_[static_cast<std::size_t>(rank) / static_cast<std::size_t>(ranks_per_node_)];
  }

 private:
  struct Node {
    double seen = 0.0;
    std::optional<std::string> lost;
  };
  struct Rank {
    RankReport report;
    double reported = 0.0;
    std::optional<double> stopped_since;          // in the same step; without the time in which all were stopped
    double suspended_seconds = 0.0;               // time in its section in which the whole run was suspended
    double window_time = 0.0, window_idle = 0.0;  // values of its report when the window of steps began
    double compute_per_step = 0.0;                // during the last window
    int slow_windows = 0;                         // number of consecutive windows that were slow
  };

  /// Excludes the time since the last poll from all limits, if the whole run was suspended meanwhile.
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
  std::int64_t window_step_ = 0;  // step at which the present window for comparing ranks began; 0: none has
  double window_time_ = 0.0;
  std::deque<double> step_seconds_;  // durations of the last steps
};

}  // namespace tessera
