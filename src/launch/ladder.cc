#include "launch/ladder.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace tessera {
namespace {

/// A step that fails this often fails because of the program or the data, not the hardware.
constexpr int kFailuresOfStep = 3;

/// Storage that has failed again is left alone for this many seconds, and twice as long each time.
constexpr double kFirstPause = 5.0, kLongestPause = 300.0, kHour = 3600.0;

}  // namespace

std::string_view name_of(Action action) {
  switch (action) {
    case Action::kRestart:
      return "restart on the same nodes";
    case Action::kReplace:
      return "restart with a spare";
    case Action::kRequeue:
      return "requeue";
    case Action::kStop:
      return "stop";
  }
  return "unknown";
}

Decision Ladder::decide(const Failure& failure, int num_spares, double now) {
  Decision decision = choose(failure, num_spares, now);
  if (failure.kind == FailureKind::kStorageFailed) decision.pause_seconds = pause_for_storage(now);
  return decision;
}

double Ladder::pause_for_storage(double now) {
  if (now - storage_failed_at_ > kHour) failures_of_storage_ = 0;
  storage_failed_at_ = now;
  const int again = failures_of_storage_++;
  return again == 0 ? 0.0 : std::min(kLongestPause, std::ldexp(kFirstPause, again - 1));
}

Decision Ladder::choose(const Failure& failure, int num_spares, double now) {
  using Kind = FailureKind;
  if (failure.kind == Kind::kWrongInput && (!has_trained_ || failure.node.empty())) {
    return {Action::kStop, "what was given cannot work, and a restart does not help", ExitStatus::kWrongInput};
  }
  if (failure.kind == Kind::kLossSpike) {
    return {Action::kStop,
            fmt::format("the loss of step {} is a spike (training.max_loss_spike), also when it is computed again: the "
                        "data or the settings are at fault, not the hardware",
                        failure.step)};
  }
  if (failure.kind == Kind::kTakenOver) {
    return {Action::kStop, "another launcher has taken the run over", ExitStatus::kTakenOver};
  }
  // Pauses limit restarts after storage has failed. It may be away for hours, and the copies in memory wait for it.
  const bool waits_for_storage = failure.kind == Kind::kStorageFailed && restarts_.most() > 0;
  if (!waits_for_storage && !restarts_.take(now)) {
    return {Action::kStop,
            fmt::format("there were {} restarts within an hour, the limit (--restarts-per-hour)", restarts_.most())};
  }
  if (failure.kind == Kind::kNodeLost) return replace(failure, num_spares, fmt::format("{} is lost", failure.node));

  const int before = failures_of_node_[failure.node]++;
  const bool says_nothing_of_the_step =
      failure.kind == Kind::kRankSlow || failure.kind == Kind::kNodeSick || failure.kind == Kind::kStorageFailed;
  if (failure.step > 0 && !says_nothing_of_the_step) {
    FailuresOfStep& step = failures_of_step_[failure.step];
    ++step.count;
    if (failure.kind == Kind::kNonFinite && !failure.node.empty()) step.not_finite_on.insert(failure.node);
    const bool is_on_other_hardware = step.not_finite_on.size() > 1;
    if (is_on_other_hardware || step.count >= kFailuresOfStep) {
      return {Action::kStop, fmt::format("step {} failed {} times{}: the program or the data is at fault, not the "
                                         "hardware",
                                         failure.step, step.count, is_on_other_hardware ? ", on different nodes" : "")};
    }
  }
  switch (failure.kind) {
    case Kind::kRankSlow:
      return replace(failure, num_spares, fmt::format("{} is slow", failure.node));
    case Kind::kNodeSick:
      return replace(failure, num_spares, fmt::format("{} is sick", failure.node));
    case Kind::kNonFinite:
      if (failure.node.empty()) return {Action::kRestart, "no node can be blamed: all are tried once more"};
      return replace(failure, num_spares, fmt::format("step {} was not finite twice there", failure.step));
    case Kind::kWeightsDiffer:
      if (failure.sure == Certainty::kCertain) {
        return replace(failure, num_spares, fmt::format("{} computes or keeps numbers wrongly", failure.node));
      }
      return {Action::kRestart, "the run goes on from the last copy that was verified"};
    default:
      break;
  }
  if (before > 0 && !failure.node.empty()) {
    return replace(failure, num_spares, fmt::format("{} has failed {} times", failure.node, before + 1));
  }
  return {Action::kRestart, "a first failure may pass"};
}

Decision Ladder::replace(const Failure& failure, int num_spares, const std::string& why) const {
  if (num_spares > 0 && !failure.node.empty()) return {Action::kReplace, why};
  if (failure.kind != FailureKind::kNodeLost) return {Action::kRestart, why + ", and there is no spare"};
  if (can_requeue_) return {Action::kRequeue, why + ", and there is no spare", ExitStatus::kRequeue};
  return {Action::kStop, why + ", and there is no spare", ExitStatus::kHold};
}

}  // namespace tessera
