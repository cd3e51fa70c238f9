// Whether a process of this machine lives, from /proc.
#pragma once

#include <sys/types.h>

#include <cstdint>

namespace tessera {

enum class ProcessState : std::uint8_t {
  kUnknown,  // of another machine, whose /proc cannot be read
  kLives,
  kStopped,  // by a signal (SIGSTOP, Ctrl-Z) or a debugger
  kEnded,
};

/// When a process started, in the kernel's ticks since boot; 0 if there is no such process. A number that is used again
/// belongs to a process with another start.
std::uint64_t start_of_process(pid_t pid);

/// `start`: of the process that is meant, as start_of_process() told it; 0 if that is not known.
ProcessState state_of_process(pid_t pid, std::uint64_t start);

}  // namespace tessera
