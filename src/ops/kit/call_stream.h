// The streams of a dispatcher's calls (ep/dispatcher.h) and of operators that run at the same time.
#pragma once

#include <optional>

#include "ops/runtime/context.h"
#include "ops/runtime/runtime.h"

namespace tessera {

/// Runs a call beside operators of the main stream.
///
///   CallStream call(op, num_sms);
///   others(call.beside(), ...);  // follow all that ran on `op` before
///   some(call.begin(), ...);     // follows the same, and runs at the same time
///   call.join();                 // what runs on `op` from here on follows both
///
/// Neither may read or overwrite what the other writes. Until join(), the arena takes no memory back if something runs
/// beside. On a CPU, each operator runs when it is called.
///
/// Neither is on the main stream. So another pass may go on there before join() is called (ep/turns.h).
class CallStream {
 public:
  /// `num_sms` is the number of SMs that the operators beside the call leave for it. With 0 nothing may run beside it.
  /// If `forks` is false, or `op` is on the calls' stream itself, the call runs on `op`.
  explicit CallStream(const Context& op, int num_sms = 0, bool forks = true);

  /// Returns the context of the operators that run beside the call.
  const Context& beside() const { return beside_; }
  /// Makes the call's stream wait for what ran before the construction. Returns the context of the call. If `goes_on`
  /// is true, there is no such wait: the call only follows the previous call and what ran beside that one. Then it must
  /// not touch what this pass's operators have used on the main stream since, nor their scratch memory. Must be called
  /// once, after all that runs beside.
  const Context& begin(bool goes_on = false);
  /// Makes the main stream wait for both, and later calls for what ran beside.
  void join();

 private:
  Context beside_, call_;
  const cuda::Stream* main_ = nullptr;  // null: the call runs on it
  cuda::Fence before_, beside_done_;
  std::optional<ArenaHold> hold_;
};

}  // namespace tessera
