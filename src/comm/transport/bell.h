// Wakes the threads of a rank when something happens to its messages, so that they need not poll.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace tessera {

class Bell {
 public:
  /// Returns how often the bell has been rung, modulo 2³². Call this before checking for messages, and pass the result
  /// to wait_for() or wait() if there are none.
  std::uint32_t count() const { return count_.load(); }
  void ring();
  /// Waits until the bell has been rung since count() returned `seen`, but at most `longest`. It may return early.
  void wait_for(std::uint32_t seen, std::chrono::nanoseconds longest);
  /// Waits without a limit. It may return early.
  void wait(std::uint32_t seen);

 private:
  // A waiting thread sets is_awaited_ and then reads count_. ring() increments count_ and then reads is_awaited_. So at
  // least one of the two threads sees what the other one has written.
  std::atomic<std::uint32_t> count_{0};
  std::atomic<bool> is_awaited_{false};
};

}  // namespace tessera
