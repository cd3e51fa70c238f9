// Finds out, outside of a job's allocation, whether the launcher of a run is lost. Slurm keeps a job that was submitted
// with --no-kill RUNNING when its batch host dies, although its script is gone. The class only judges: observations and
// times are passed in, so that tests need not wait.
#pragma once

#include <optional>
#include <string>

#include "launch/engines/slurm.h"
#include "launch/hourly_limit.h"
#include "launch/launch_state.h"

namespace tessera {

struct LauncherWatchOptions {
  double silent_seconds = 10.0;  // longest time without a change of launch.json before the launcher is suspected
  int requeues_per_hour = 3;
};

class LauncherWatch {
 public:
  explicit LauncherWatch(const LauncherWatchOptions& options)
      : options_(options), requeues_(options.requeues_per_hour) {}

  /// Takes what launch.json held at `now`, in seconds on a monotonic clock. Call it at least once a second. In longer
  /// gaps the storage hung or this process was suspended, so they do not count as the launcher's silence. Returns what
  /// is new, for people, or "" if nothing is.
  std::string look(const LaunchState& state, double now);

  /// Returns whether there is nothing to watch any more: the run has ended, or nobody will resume its job.
  bool is_over() const { return is_over_; }
  /// Returns whether a new launcher is at work, so that the caller should call set_reachable().
  bool wants_contact() const { return is_alive_ && !is_reachable_; }
  /// Records whether the launcher answers while it works (is_launcher_at). If it does not, later silence proves
  /// nothing.
  void set_reachable(bool reachable) { is_reachable_ = reachable; }
  /// Returns whether the caller should call judge(). It should if launch.json has not changed for too long. It also
  /// should if the launcher has stopped and its job may have been requeued or have ended.
  bool is_suspect() const { return silent_ >= options_.silent_seconds || state_.state == "stopped"; }

  struct Verdict {
    bool requeue = false;
    bool again = false;  // this was asked before, and Slurm has not done it yet
    std::string text;    // for people; stays the same as long as nothing changes
  };
  /// Returns what to do about a suspect, given its job and whether it answers at `now`.
  Verdict judge(const SlurmJob& job, bool answers, double now);

 private:
  LauncherWatchOptions options_;
  LaunchState state_;
  double looked_ = 0.0, silent_ = 0.0;
  bool is_known_ = false;             // state_ has been read
  bool is_alive_ = false;             // launch.json of this launcher has changed while we watched
  std::optional<bool> is_reachable_;  // whether this launcher can be reached; not set: not tried yet
  bool is_over_ = false;
  HourlyLimit requeues_;
  std::optional<LaunchState::Job> requeued_;  // the last that was to be requeued
};

}  // namespace tessera
