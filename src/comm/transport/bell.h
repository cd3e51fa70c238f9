// Wakes the threads of a rank when something happens to its messages, so that they need not poll.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace tessera {

class Bell {
 public:
  /// Returns how often the bell has been rung, modulo 2³². Read it before looking for what the bell tells of.
  std::uint32_t count() const { return count_.load(); }
  void ring();
  /// Waits until the bell has been rung since count() returned `seen`, but no longer than this. It may return early.
  void wait_for(std::uint32_t seen, std::chrono::nanoseconds longest);
  /// Waits without a limit. It may return early.
  void wait(std::uint32_t seen);

 private:
  // A thread that waits sets the second word before it looks at the first one, and ring() uses them in the opposite
  // order. So one of the two sees the other.
  std::atomic<std::uint32_t> count_{0};
  std::atomic<bool> is_awaited_{false};
};

}  // namespace tessera
