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
};

class Ladder {
 public:
  /// `restarts_per_hour` is the most restarts in any hour.
  Ladder(int restarts_per_hour, bool can_requeue) : restarts_(restarts_per_hour), can_requeue_(can_requeue) {}

  /// Returns what to do about a failure. `num_spares` is the number of nodes that are ready. `now` is in seconds on a
  /// monotonic clock.
  Decision decide(const Failure& failure, int num_spares, double now);

  /// Forgets a node's failures, because an operator has repaired it. Its next failure counts as its first.
  void forget_failures(const std::string& node) { failures_of_node_.erase(node); }

 private:
  struct FailuresOfStep {
    int count = 0;                             // of ranks, whatever their kind
    std::set<std::string> not_finite_on = {};  // nodes that were blamed because the step was not finite there
  };

  Decision replace(const Failure& failure, int num_spares, const std::string& why) const;

  HourlyLimit restarts_;
  bool can_requeue_;
  std::map<std::string, int> failures_of_node_;  // number of failures for which a node's ranks were blamed
  std::map<std::int64_t, FailuresOfStep> failures_of_step_;
};

}  // namespace tessera
