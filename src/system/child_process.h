// Starts a program as a child process and waits for its end.
#pragma once

#include <sys/types.h>

#include <csignal>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

namespace tessera {

/// Holds what a signal handler records: the last signal, and how many have arrived.
struct StopRequest {
  std::sig_atomic_t signal = 0, count = 0;
};

/// Records a signal. A signal handler calls it. SIGHUP, which a closing terminal sends, is recorded as SIGTERM.
inline void note_signal(volatile StopRequest& stop, int signal) {
  stop.signal = signal == SIGHUP ? SIGTERM : signal;
  stop.count = stop.count + 1;
}

struct SpawnOptions {
  std::filesystem::path log = {};  // receives standard output and error, appended; empty: the child inherits ours
  int input = -1;                  // descriptor that becomes the child's standard input; -1: the child inherits ours
  std::vector<std::string> variables = {};  // "NAME=value", added to our environment in place of those of the same name
};

/// Starts the program, which it looks for in PATH, in its own process group. A terminal's Ctrl-C then reaches the
/// program only through us, once. A second signal would keep it from saving. Throws Error if it cannot be started.
pid_t spawn(const std::string& program, const std::vector<std::string>& arguments, const SpawnOptions& options = {});

/// Returns the exit status in what waitpid() reported. It is that of the process, or 128 + the signal that ended it.
int exit_status_of(int wait_status);

/// Waits for the process and passes on every signal that `stop` records meanwhile. The first signal makes a trainer
/// save and end, the second ends it at once. Calls `now_and_then` several times per second, if it is given. Returns the
/// process's exit status, or 128 + the signal that ended it.
int wait_for(pid_t process, const volatile StopRequest& stop, const std::function<void()>& now_and_then = {});

}  // namespace tessera
