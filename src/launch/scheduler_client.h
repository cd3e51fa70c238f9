// The commands that a launcher gives to the scheduler, as processes of their own. It waits for none of them, because a
// scheduler that does not answer must not stop a run. Times are in seconds on a monotonic clock.
#pragma once

#include <sys/types.h>

#include <optional>
#include <vector>

#include "launch/engines/engine.h"

namespace tessera {

class SchedulerClient {
 public:
  /// Starts a command whose result does not matter. Does nothing if it is nullopt, because there is no scheduler to
  /// tell.
  void tell(const std::optional<CommandLine>& command);
  /// Takes note of commands that have ended.
  void reap();

  // The scheduler is asked for one node at a time.
  bool is_asking() const { return request_ != 0; }
  bool may_ask(double now) const { return now >= next_request_; }
  /// Starts the command that asks (Engine::grow).
  void ask(const CommandLine& command);
  /// Returns the exit status of that command when it has ended, which also ends the request. Returns nullopt before.
  std::optional<int> take_answer();
  /// Must be called after a request that got a node.
  void note_granted(double now);
  /// Must be called after a request that got none. Doubles the time until the next one may begin, and returns it.
  double note_refused(double now);
  /// Rules out further requests, because there is no scheduler.
  void never_ask();
  /// Ends the request that is under way, if there is one.
  void withdraw();

 private:
  /// The number of seconds between two requests: the first value, and the largest.
  static constexpr double kBetweenRequests = 10.0, kLongestBetweenRequests = 600.0;

  std::vector<pid_t> commands_;  // those that are still running
  pid_t request_ = 0;            // the process that asks for a node; 0: none
  double next_request_ = 0.0, between_requests_ = kBetweenRequests;
};

}  // namespace tessera
