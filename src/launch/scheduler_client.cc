#include "launch/scheduler_client.h"

#include <sys/wait.h>

#include <algorithm>
#include <csignal>
#include <limits>

#include "base/error.h"
#include "base/log.h"
#include "system/child_process.h"

namespace tessera {

void SchedulerClient::tell(const std::optional<CommandLine>& command) {
  if (!command) return;
  try {
    commands_.push_back(spawn(command->front(), {command->begin() + 1, command->end()}));
  } catch (const Error& error) {  // there are too many processes or descriptors for now; the run must go on
    spdlog::warn("{} was not told: {}", command->front(), error.what());
  }
}

void SchedulerClient::reap() {
  std::erase_if(commands_, [](pid_t command) { return waitpid(command, nullptr, WNOHANG) != 0; });
}

void SchedulerClient::ask(const CommandLine& command) {
  request_ = spawn(command.front(), {command.begin() + 1, command.end()});
}

std::optional<int> SchedulerClient::take_answer() {
  int status = 0;
  if (waitpid(request_, &status, WNOHANG) != request_) return std::nullopt;
  request_ = 0;
  return exit_status_of(status);
}

void SchedulerClient::note_granted(double now) {
  between_requests_ = kBetweenRequests;
  next_request_ = now + between_requests_;
}

double SchedulerClient::note_refused(double now) {
  between_requests_ = std::min(kLongestBetweenRequests, 2.0 * between_requests_);
  next_request_ = now + between_requests_;
  return between_requests_;
}

void SchedulerClient::never_ask() { next_request_ = std::numeric_limits<double>::infinity(); }

void SchedulerClient::withdraw() {
  if (request_ != 0) kill(-request_, SIGTERM);
}

}  // namespace tessera
