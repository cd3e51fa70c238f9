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

/// Starts the program in a process group of its own, so that a terminal's Ctrl-C reaches it through us, once: a second
/// signal would keep it from saving. Standard output and error are appended to `log`; an empty `log` leaves them as
/// they are.
pid_t spawn(const std::string& program, const std::vector<std::string>& arguments, const std::filesystem::path& log);

/// Waits for the process and hands it every signal that came meanwhile: the first makes a trainer save and end, the
/// second ends it at once. Returns its exit status, or 128 + signal.
int wait_for(pid_t process, const volatile StopRequest& stop);

}  // namespace tessera
