// A program that is started and waited for.
#pragma once

#include <sys/types.h>

#include <csignal>
#include <filesystem>
#include <string>
#include <vector>

namespace tessera {

/// What a signal handler leaves: how many signals came, and the last.
struct StopRequest {
  std::sig_atomic_t signal = 0, count = 0;
};

/// Notes a signal, for its handler. A terminal that closes asks for the same as SIGTERM.
inline void note_signal(volatile StopRequest& stop, int signal) {
  stop.signal = signal == SIGHUP ? SIGTERM : signal;
  stop.count = stop.count + 1;
}

struct SpawnOptions {
  std::filesystem::path log = {};  // standard output and error are appended to it; empty: they stay as they are
  int input = -1;                  // a descriptor that becomes its standard input; -1: ours
  std::vector<std::string> variables = {};  // "NAME=value": added to our environment
};

/// Starts the program, which is looked for in PATH, in a process group of its own: so a terminal's Ctrl-C reaches it
/// through us, once, where a second signal would keep it from saving. Throws Error if it cannot be started.
pid_t spawn(const std::string& program, const std::vector<std::string>& arguments, const SpawnOptions& options = {});

/// The exit status of a process that waitpid() has told of: its own, or 128 + the signal that ended it.
int exit_status_of(int wait_status);

/// Waits for the process and hands it every signal that came meanwhile: the first makes a trainer save and end, the
/// second ends it at once. Returns its exit status, or 128 + signal.
int wait_for(pid_t process, const volatile StopRequest& stop);

}  // namespace tessera
