// Runs the program as a child process.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/file.h"
#include "system/shell_word.h"
#include "tests/data/support.h"

namespace tessera::app_test {

struct Finished {
  int status;          // exit status, or 128 + signal
  std::string output;  // standard output and standard error
};

/// Returns the words that start the program as several ranks. They precede the program on the command line.
inline std::vector<std::string> mpirun(int num_ranks) {
  return {MPIRUN, "--allow-run-as-root", "--oversubscribe", "-np", std::to_string(num_ranks)};
}

/// Returns the arguments of `tessera train` for a small model on the test's dataset of bytes, followed by `more`.
inline std::vector<std::string> small_run(const data::TemporaryFolder& scratch, const std::vector<std::string>& more) {
  std::vector<std::string> arguments = {"train",
                                        "--training.dataset_path=" + (scratch / "dataset").string(),
                                        "--job.dump_folder=" + (scratch / "outputs").string(),
                                        "--model.args.vocab_size=258",
                                        "--model.args.dim=32",
                                        "--model.args.n_layers=2",
                                        "--model.args.n_heads=2",
                                        "--checkpoint.enable=true"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

/// Returns the words that mount a tmpfs of `size`, such as "64m", on the folder for the program that follows them, and
/// for no other. Returns none if this user may not mount one.
inline std::vector<std::string> with_tmpfs(const std::string& size, const std::string& folder) {
  std::vector<std::string> words = {"/usr/bin/unshare",
                                    "--map-root-user",
                                    "--mount",
                                    "/bin/sh",
                                    "-c",
                                    fmt::format("mount -t tmpfs -o size={} tmpfs {} && exec \"$@\"", size, folder),
                                    "sh"};
  // NOLINTNEXTLINE(bugprone-command-processor)
  if (std::system((shell_line(words) + " true 2>/dev/null").c_str()) != 0) words.clear();
  return words;
}

/// Returns the words that make a program of root obey the permissions of files. Other users' programs need no words.
/// Returns nullopt if this root may not give up a right.
inline std::optional<std::vector<std::string>> obeying_permissions() {
  if (geteuid() != 0) return std::vector<std::string>();
  const std::string overriding = "-dac_override,-dac_read_search";  // root's capabilities to ignore permissions
  const std::vector<std::string> words = {"/usr/bin/setpriv", "--bounding-set=" + overriding,
                                          "--inh-caps=" + overriding};
  // NOLINTNEXTLINE(bugprone-command-processor)
  return std::system((shell_line(words) + " true 2>/dev/null").c_str()) == 0 ? std::optional(words) : std::nullopt;
}

/// Writes an executable shell script and returns its path.
inline std::filesystem::path write_script(const std::filesystem::path& path, const std::string& text) {
  data::write_file(path, "#!/bin/sh\n" + text);
  std::filesystem::permissions(path, std::filesystem::perms::owner_all);
  return path;
}

/// Runs the program as a child process. Its output goes to a file. `launcher` holds the words that precede the program
/// on the command line. The destructor kills it if a test has given up before finish().
class Process {
 public:
  Process(const data::TemporaryFolder& scratch, const std::vector<std::string>& arguments,
          rlim_t max_file_bytes = RLIM_INFINITY, const std::vector<std::string>& launcher = {})
      : log_(scratch / "log.txt") {
    std::filesystem::remove(log_);
    pid_ = fork();
    if (pid_ != 0) return;
    const struct rlimit limit { .rlim_cur = max_file_bytes, .rlim_max = RLIM_INFINITY };
    setrlimit(RLIMIT_FSIZE, &limit);
    if (std::freopen(log_.c_str(), "w", stdout) == nullptr) _exit(127);
    dup2(STDOUT_FILENO, STDERR_FILENO);
    std::vector<char*> argv;
    for (const std::string& argument : launcher) argv.push_back(const_cast<char*>(argument.c_str()));
    argv.push_back(const_cast<char*>(TESSERA_BINARY));
    for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
    argv.push_back(nullptr);
    execv(argv.front(), argv.data());
    _exit(127);
  }

  ~Process() {
    if (!is_finished_) kill_all();
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  std::string output() const { return std::filesystem::exists(log_) ? read_text_file(log_) : ""; }
  /// Waits for a text in the output, or for the end of the process. A machine that runs much else may need a minute for
  /// steps of seconds.
  void wait_for_output(const std::string& text) const {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(120);
    while (output().find(text) == std::string::npos && !has_ended() && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    ASSERT_THAT(output(), ::testing::HasSubstr(text));
  }
  void send(int signal) const { kill(pid_, signal); }
  /// Returns the child processes of the program, or of its launcher.
  std::vector<pid_t> children() const {
    std::vector<pid_t> found;
    for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
      std::ifstream status(entry.path() / "status");
      for (std::string line; std::getline(status, line);) {
        if (line == fmt::format("PPid:\t{}", pid_)) found.push_back(std::stoi(entry.path().filename()));
      }
    }
    return found;
  }
  /// Waits for the process to end. After `limit` it kills the process and its children, and the test fails.
  Finished finish(std::chrono::seconds limit = std::chrono::seconds(300)) const {
    const auto end = std::chrono::steady_clock::now() + limit;
    int status = 0;
    while (waitpid(pid_, &status, WNOHANG) == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      if (std::chrono::steady_clock::now() < end) continue;
      ADD_FAILURE() << "still running after " << limit.count() << " s:\n" << output();
      status = kill_all();
      break;
    }
    is_finished_ = true;
    return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), output()};
  }

 private:
  /// Kills the process and its children, and returns its status.
  int kill_all() const {
    int status = 0;
    for (const pid_t child : children()) kill(child, SIGKILL);
    kill(pid_, SIGKILL);
    waitpid(pid_, &status, 0);
    return status;
  }
  /// Returns whether the process has ended. finish() can still ask for its status.
  bool has_ended() const {
    siginfo_t info{};
    return waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == pid_;
  }

  std::filesystem::path log_;
  pid_t pid_;
  mutable bool is_finished_ = false;
};

}  // namespace tessera::app_test
