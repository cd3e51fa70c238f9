// The program as a child process.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "base/file.h"
#include "tests/data/support.h"

namespace tessera::app_test {

struct Finished {
  int status;          // exit status, or 128 + signal
  std::string output;  // standard output and error
};

/// A running program; its output goes to a file.
class Process {
 public:
  Process(const data::Scratch& scratch, const std::vector<std::string>& arguments,
          rlim_t max_file_bytes = RLIM_INFINITY)
      : log_(scratch / "log.txt") {
    std::filesystem::remove(log_);
    pid_ = fork();
    if (pid_ != 0) return;
    const struct rlimit limit { .rlim_cur = max_file_bytes, .rlim_max = RLIM_INFINITY };
    setrlimit(RLIMIT_FSIZE, &limit);
    if (std::freopen(log_.c_str(), "w", stdout) == nullptr) _exit(127);
    dup2(STDOUT_FILENO, STDERR_FILENO);
    std::vector<char*> argv = {const_cast<char*>(TESSERA_BINARY)};
    for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
    argv.push_back(nullptr);
    execv(TESSERA_BINARY, argv.data());
    _exit(127);
  }

  std::string output() const { return std::filesystem::exists(log_) ? read_text_file(log_) : ""; }
  void wait_for_output(const std::string& text) const {
    for (int i = 0; i < 600 && output().find(text) == std::string::npos; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    ASSERT_THAT(output(), ::testing::HasSubstr(text));
  }
  void send(int signal) const { kill(pid_, signal); }
  Finished finish() const {
    int status = 0;
    waitpid(pid_, &status, 0);
    return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), output()};
  }

 private:
  std::filesystem::path log_;
  pid_t pid_;
};

}  // namespace tessera::app_test
