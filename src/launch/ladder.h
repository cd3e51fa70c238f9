// The recovery ladder: what a launcher does about a failure. The same nodes once more, then a spare in the place of the
// node that is blamed, then the scheduler's requeue, then a stop with a report.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "base/exit_status.h"
#include "launch/hourly_limit.h"
#include "launch/watch/failure.h"

namespace tessera {

enum class Action : std::uint8_t {
  kRestart,  // on the same nodes
  kReplace,  // restart with a spare in the place of the blamed node
  kRequeue,  // end, so that the scheduler starts the launch again
  kStop,
};
/// "restart on the same nodes".
std::string_view name_of(Action action);

struct Decision {
  Action action = Action::kStop;
  std::string reason;                     // one sentence
  ExitStatus status = ExitStatus::kHold;  // for kRequeue and kStop
};

class Ladder {
 public:
  /// At most `restarts_per_hour` times in any hour.
  Ladder(int restarts_per_hour, bool can_requeue) : restarts_(restarts_per_hour), can_requeue_(can_requeue) {}

  /// `num_spares`: nodes that are ready. `now`: seconds on a clock that only goes on.
  Decision decide(const Failure& failure, int num_spares, double now);

  /// An operator has repaired the node: its next failure counts as its first.
  void forget_failures(const std::string& node) { failures_of_node_.erase(node); }

 private:
  Decision replace(const Failure& failure, int num_spares, const std::string& why) const;

  HourlyLimit restarts_;
  bool can_requeue_;
  std::map<std::string, int> failures_of_node_;                 // that a node's ranks were blamed for
  std::map<std::int64_t, std::map<std::string, int>> at_step_;  // failures of ranks, by step and node
};

}  // namespace tessera
