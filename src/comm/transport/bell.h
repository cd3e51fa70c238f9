// Wakes the threads of a rank when something happens to its messages, so that they need not poll.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <ctime>

namespace tessera {

class Bell {
 public:
  /// Returns a number that changes whenever the bell is rung. Call this before checking for messages, and pass the
  /// result to wait_for() or wait() if there are none.
  std::uint32_t count() const { return state_.load() & ~kIsAwaited; }
  void ring();
  /// Waits until the bell has been rung since count() returned `seen`, but at most `longest`. It may return early.
  void wait_for(std::uint32_t seen, std::chrono::nanoseconds longest);
  /// Waits without a limit. It may return early.
  void wait(std::uint32_t seen);

 private:
  /// Sets kIsAwaited and sleeps, unless the bell has been rung since.
  void sleep(std::uint32_t seen, const timespec* longest);

  // The lowest bit says that a thread waits. The others count how often the bell has been rung. Both are in one word:
  // with a flag of its own, a ring could clear the flag of a thread that waits for the next ring.
  static constexpr std::uint32_t kIsAwaited = 1, kRing = 2;
  std::atomic<std::uint32_t> state_{0};
};

}  // namespace tessera
