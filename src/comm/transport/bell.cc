#include "comm/transport/bell.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <limits>

namespace tessera {

// A condition variable would take a mutex, on which those that ring and those that wake up would queue.
static_assert(sizeof(std::atomic<std::uint32_t>) == sizeof(std::uint32_t));

void Bell::ring() {
  std::uint32_t before = state_.load();
  while (!state_.compare_exchange_weak(before, (before & ~kIsAwaited) + kRing)) {
  }
  if ((before & kIsAwaited) == 0) return;
  static_cast<void>(
      syscall(SYS_futex, &state_, FUTEX_WAKE_PRIVATE, std::numeric_limits<int>::max(), nullptr, nullptr, 0));
}

void Bell::sleep(std::uint32_t seen, const timespec* longest) {
  const std::uint32_t awaited = seen | kIsAwaited;
  std::uint32_t now = seen;
  if (!state_.compare_exchange_strong(now, awaited) && now != awaited) return;
  static_cast<void>(syscall(SYS_futex, &state_, FUTEX_WAIT_PRIVATE, awaited, longest, nullptr, 0));
}

void Bell::wait(std::uint32_t seen) { sleep(seen, nullptr); }

void Bell::wait_for(std::uint32_t seen, std::chrono::nanoseconds longest) {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(longest);
  const timespec time{.tv_sec = seconds.count(), .tv_nsec = (longest - seconds).count()};
  sleep(seen, &time);
}

}  // namespace tessera
