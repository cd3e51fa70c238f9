// Finds out, outside of a job's allocation, whether the launcher of a run is lost: Slurm keeps a job that was submitted
// with --no-kill RUNNING when its batch host dies, without its script. It only judges: what was seen comes from
// outside, and when, so that tests need not wait.
#pragma once

#include <optional>
#include <string>

#include "launch/engines/slurm.h"
#include "launch/hourly_limit.h"
#include "launch/launch_state.h"

namespace tessera {

struct LauncherWatchOptions {
  double silent_seconds = 10.0;  // without a new launch.json, after which a launcher is suspected
  int requeues_per_hour = 3;
};

class LauncherWatch {
 public:
  explicit LauncherWatch(const LauncherWatchOptions& options)
      : options_(options), requeues_(options.requeues_per_hour) {}

  /// What launch.json held at `now`, seconds on a clock that only goes on. To be called at least once a second: longer
  /// gaps are time in which the storage hung or this process was suspended, and do not count as the launcher's silence.
  /// Returns what is new, for people; empty if nothing is.
  std::string look(const LaunchState& state, double now);

  /// Whether there is nothing to watch any more: the run has ended, or nobody will go on with its job.
  bool is_over() const { return is_over_; }
  /// Whether a new launcher is at work, and set_reachable() is to be called.
  bool wants_contact() const { return is_alive_ && !is_reachable_; }
  /// Whether the launcher answers while it works (is_launcher_at). If not, its silence later says nothing.
  void set_reachable(bool reachable) { is_reachable_ = reachable; }
  /// Whether judge() is to be called: launch.json has not changed for so long, or the launcher has stopped, and its job
  /// may have been requeued or have ended.
  bool is_suspect() const { return silent_ >= options_.silent_seconds || state_.state == "stopped"; }

  struct Verdict {
    bool requeue = false;
    std::string text;  // for people, and the same as long as nothing changes
  };
  /// What is to be done about a suspect, given its job and whether it answers at `now`.
  Verdict judge(const SlurmJob& job, bool answers, double now);

 private:
  LauncherWatchOptions options_;
  LaunchState state_;
  double looked_ = 0.0, silent_ = 0.0;
  bool is_known_ = false;             // state_ has been read
  bool is_alive_ = false;             // launch.json of this launcher has changed before our eyes
  std::optional<bool> is_reachable_;  // of this launcher; none: not tried yet
  bool is_over_ = false;
  HourlyLimit requeues_;
};

}  // namespace tessera
