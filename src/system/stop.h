// Stops the program's work when a signal asks for it. The signal handler calls request_stop. Long work calls
// throw_if_stopped often. It throws Stopped, so that destructors clean up.
#pragma once

#include <atomic>
#include <csignal>
#include <exception>

namespace tessera {

/// Reports that a signal has asked for a stop.
class Stopped : public std::exception {
 public:
  explicit Stopped(int signal) : signal_(signal) {}
  int signal() const { return signal_; }
  const char* what() const noexcept override { return "stopped by a signal"; }

 private:
  int signal_;
};

namespace detail {
inline std::atomic<int> stop_signal{0};
static_assert(std::atomic<int>::is_always_lock_free, "a signal's handler sets it");
}  // namespace detail

/// Asks for a stop. It restores the signal's default action, so that a second signal ends the program at once.
inline void request_stop(int signal) {
  detail::stop_signal.store(signal, std::memory_order_relaxed);
  std::signal(signal, SIG_DFL);
}

/// Throws Stopped if a stop was requested. It is cheap enough to call for every word of a text.
inline void throw_if_stopped() {
  if (const int signal = detail::stop_signal.load(std::memory_order_relaxed)) [[unlikely]]
    throw Stopped(signal);
}

}  // namespace tessera
