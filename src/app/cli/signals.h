// Handles the signals that ask a run to end.
#pragma once

#include <csignal>

#include "system/child_process.h"

namespace tessera {

/// Calls `handler` for SIGINT, SIGTERM and SIGHUP, which a closing terminal sends. Under nohup SIGHUP stays ignored.
/// From then on, output that nobody reads any more does not end the program, because Ctrl-C also ends the `tee` that a
/// run's output is piped into. SIG_DFL restores the defaults.
inline void handle_stop_signals(void (*handler)(int)) {
  std::signal(SIGINT, handler);
  std::signal(SIGTERM, handler);
  if (std::signal(SIGHUP, handler) == SIG_IGN) std::signal(SIGHUP, SIG_IGN);
  std::signal(SIGPIPE, handler == SIG_DFL ? SIG_DFL : SIG_IGN);
}

/// Counts the stop signals from now on, and returns the count, which lasts as long as the process.
inline const volatile StopRequest& count_stop_signals() {
  static volatile StopRequest stop;
  handle_stop_signals([](int signal) { note_signal(stop, signal); });
  return stop;
}

}  // namespace tessera
