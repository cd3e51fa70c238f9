// The recovery ladder decides what a launcher does about a failure. First it restarts on the same nodes. Then a spare
// replaces the blamed node. Then it asks for the scheduler's requeue, and at last it stops with a report.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>

#include "base/exit_status.h"
#include "launch/hourly_limit.h"
#include "launch/watch/failure.h"

namespace tessera {

/// Says what the launcher does about a failure.
enum class Action : std::uint8_t {
  kRestart,  // restart on the same nodes
  kReplace,  // restart with a spare in the place of the blamed node
  kRequeue,  // end, so that the scheduler starts the launch again
  kStop,
};
/// Returns the action's name: "restart on the same nodes".
std::string_view name_of(Action action);

struct Decision {
  Action action = Action::kStop;
  std::string reason;                     // one sentence
  ExitStatus status = ExitStatus::kHold;  // for kRequeue and kStop
  double pause_seconds = 0.0;             // before the next attempt
};

class Ladder {
 public:
  /// `restarts_per_hour` is the most restarts in any hour. Those after failures of storage count only if it is 0.
  Ladder(int restarts_per_hour, bool can_requeue) : restarts_(restarts_per_hour), can_requeue_(can_requeue) {}

  /// Returns what to do about a failure. `num_spares` is the number of nodes that are ready. `now` is in seconds on a
  /// monotonic clock.
  Decision decide(const Failure& failure, int num_spares, double now);

  /// Must be called when the run trains: what was given works. From then on an input that cannot work on one node
  /// alone, as without a mount, is that node's failure.
  void note_training() { has_trained_ = true; }
  /// Forgets a node's failures, because an operator has repaired it. Its next failure counts as its first.
  void forget_failures(const std::string& node) { failures_of_node_.erase(node); }

 private:
  struct FailuresOfStep {
    int count = 0;                             // of ranks, whatever their kind
    std::set<std::string> not_finite_on = {};  // nodes that were blamed because the step was not finite there
  };

  Decision choose(const Failure& failure, int num_spares, double now);
  /// Returns the seconds to wait after storage has failed at `now`.
  double pause_for_storage(double now);
  Decision replace(const Failure& failure, int num_spares, const std::string& why) const;

  HourlyLimit restarts_;
  bool can_requeue_, has_trained_ = false;
  int failures_of_storage_ = 0;  // without an hour between two of them
  double storage_failed_at_ = 0.0;
  std::map<std::string, int> failures_of_node_;  // number of failures for which a node's ranks were blamed
  std::map<std::int64_t, FailuresOfStep> failures_of_step_;
};

}  // namespace tessera
