#include "comm/observe/process_state.h"

#include <fmt/format.h>
#include <signal.h>

#include <cerrno>
#include <fstream>
#include <sstream>
#include <string>

namespace tessera {
namespace {

/// Returns the fields of /proc/PID/stat after the name, which is in parentheses; the state is the first of them.
/// Returns "" if there is no such process.
std::string read_stat(pid_t pid) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  std::string stat;
  std::getline(file, stat);
  const std::size_t end_of_name = stat.rfind(')');
  return end_of_name == stat.npos || end_of_name + 2 >= stat.size() ? "" : stat.substr(end_of_name + 2);
}

std::uint64_t start_in(const std::string& stat) {
  constexpr int kFieldsBefore = 19;  // counted from the state (proc(5): state is field 3, starttime is field 22)
  std::istringstream fields(stat);
  std::string skipped;
  for (int i = 0; i < kFieldsBefore; ++i) fields >> skipped;
  std::uint64_t start = 0;
  fields >> start;
  return start;
}

}  // namespace

std::uint64_t start_of_process(pid_t pid) { return start_in(read_stat(pid)); }

ProcessState state_of_process(pid_t pid, std::uint64_t start) {
  if (kill(pid, 0) != 0 && errno == ESRCH) return ProcessState::kEnded;
  const std::string stat = read_stat(pid);
  if (stat.empty()) return ProcessState::kLives;  // it lives according to kill(), and /proc cannot be read
  const char state = stat.front();
  if (state == 'Z' || state == 'X') return ProcessState::kEnded;  // ended, but its parent has not read its status yet
  if (start != 0 && start_in(stat) != start) return ProcessState::kEnded;
  return state == 'T' || state == 't' ? ProcessState::kStopped : ProcessState::kLives;
}

}  // namespace tessera
