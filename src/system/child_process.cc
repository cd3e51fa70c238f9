#include "system/child_process.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <string_view>
#include <thread>

#include "base/error.h"
#include "base/log.h"

namespace tessera {

pid_t spawn(const std::string& program, const std::vector<std::string>& arguments, const SpawnOptions& options) {
  const std::string log = options.log.string();
  std::vector<char*> argv = {const_cast<char*>(program == "/proc/self/exe" ? "tessera" : program.c_str())};
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  if (options.input >= 0) posix_spawn_file_actions_adddup2(&files, options.input, STDIN_FILENO);
  constexpr mode_t kMode = 0666;  // the user's umask removes bits from it
  if (!log.empty()) {
    posix_spawn_file_actions_addopen(&files, STDOUT_FILENO, log.c_str(), O_WRONLY | O_CREAT | O_APPEND, kMode);
    posix_spawn_file_actions_adddup2(&files, STDOUT_FILENO, STDERR_FILENO);
  }
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGDEF);
  posix_spawnattr_setpgroup(&attributes, 0);
  sigset_t signals;  // the child gets their default actions, although this program or its caller ignores some
  sigemptyset(&signals);
  for (const int signal : {SIGINT, SIGTERM, SIGPIPE}) sigaddset(&signals, signal);
  posix_spawnattr_setsigdefault(&attributes, &signals);
  std::vector<char*> variables;
  const auto is_replaced = [&](std::string_view inherited) {
    const std::string_view name = inherited.substr(0, inherited.find('='));
    return std::ranges::any_of(options.variables,
                               [&](std::string_view added) { return added.substr(0, added.find('=')) == name; });
  };
  for (char** variable = environ; *variable != nullptr; ++variable) {
    if (!is_replaced(*variable)) variables.push_back(*variable);
  }
  for (const std::string& variable : options.variables) variables.push_back(const_cast<char*>(variable.c_str()));
  variables.push_back(nullptr);
  pid_t process = 0;
  const int error = posix_spawnp(&process, program.c_str(), &files, &attributes, argv.data(), variables.data());
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&files);
  require(error == 0, "cannot start '{}'{}: {}{}", program,
          log.empty() ? "" : fmt::format(" with its output to '{}'", log), std::strerror(error),
          error == ENOENT && log.empty() ? "; install it, or add its folder to PATH" : "");
  return process;
}

int exit_status_of(int wait_status) {
  return WIFEXITED(wait_status) ? WEXITSTATUS(wait_status) : 128 + WTERMSIG(wait_status);
}

int wait_for(pid_t process, const volatile StopRequest& stop, const std::function<void()>& now_and_then) {
  constexpr auto kPause = std::chrono::milliseconds(20);
  int told = 0;
  for (;;) {
    int status = 0;
    const pid_t ended = waitpid(process, &status, WNOHANG);
    require(ended >= 0 || errno == EINTR, "cannot wait for process {}: {}", process, std::strerror(errno));
    if (ended == process) return exit_status_of(status);
    for (; told < stop.count; ++told) kill(process, stop.signal);
    if (now_and_then) now_and_then();
    std::this_thread::sleep_for(kPause);
  }
}

}  // namespace tessera
