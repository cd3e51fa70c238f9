// Finds out from /proc whether a process of this machine lives.
#pragma once

#include <sys/types.h>

#include <cstdint>

namespace tessera {

enum class ProcessState : std::uint8_t {
  kUnknown,  // it is on another machine, whose /proc cannot be read
  kLives,
  kStopped,  // a signal (SIGSTOP, Ctrl-Z) or a debugger has stopped it
  kEnded,
};

/// Returns the time at which a process started, in the kernel's ticks since boot. Returns 0 if there is no such
/// process. If a pid is reused, the new process has another start.
std::uint64_t start_of_process(pid_t pid);

/// Returns the state of the process `pid` that started at `start`, a result of start_of_process(). `start` is 0 if it
/// is not known.
ProcessState state_of_process(pid_t pid, std::uint64_t start);

}  // namespace tessera
