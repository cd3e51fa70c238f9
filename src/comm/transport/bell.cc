#include "comm/transport/bell.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <limits>

namespace tessera {
namespace {

// A condition variable would take a mutex, on which those that ring and those that wake up would queue.
static_assert(sizeof(std::atomic<std::uint32_t>) == sizeof(std::uint32_t));

void wait_while_equal(const std::atomic<std::uint32_t>& word, std::uint32_t value, const timespec* longest) {
  static_cast<void>(syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, longest, nullptr, 0));
}

}  // namespace

void Bell::ring() {
  ++count_;
  if (!is_awaited_.exchange(false)) return;
  static_cast<void>(
      syscall(SYS_futex, &count_, FUTEX_WAKE_PRIVATE, std::numeric_limits<int>::max(), nullptr, nullptr, 0));
}

void Bell::wait(std::uint32_t seen) {
  is_awaited_.store(true);
  wait_while_equal(count_, seen, nullptr);
}

void Bell::wait_for(std::uint32_t seen, std::chrono::nanoseconds longest) {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(longest);
  const timespec time{.tv_sec = seconds.count(), .tv_nsec = (longest - seconds).count()};
  is_awaited_.store(true);
  wait_while_equal(count_, seen, &time);
}

}  // namespace tessera
