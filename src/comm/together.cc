#include "comm/together.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>

#include "base/stopwatch.h"

namespace tessera {

std::string broadcast_first_text(ProcessGroup& group, const std::string& text, std::string_view name) {
  const auto own_size = static_cast<double>(text.size());
  const std::vector<double> sizes = group.all_gather(std::span(&own_size, 1), name);
  const auto first = std::find_if(sizes.begin(), sizes.end(), [](double size) { return size > 0.0; });
  if (first == sizes.end()) return {};
  std::string found = text;
  found.resize(static_cast<std::size_t>(*first));
  // A broadcast moves tensors, so the text is padded to whole words.
  std::vector<std::int32_t> words(found.size() / sizeof(std::int32_t) + 1);
  std::memcpy(words.data(), found.data(), found.size());
  const auto num_words = static_cast<std::int64_t>(words.size());
  group
      .broadcast(Tensor(words.data(), {num_words}, DType::kInt32, Device::kCpu),
                 static_cast<int>(first - sizes.begin()), name)
      .wait();
  std::memcpy(found.data(), words.data(), found.size());
  return found;
}

void run_together(ProcessGroup& group, std::string_view name, const std::function<void()>& body) {
  if (group.size() == 1) return body();
  std::string message;  // the first character is the exit status
  try {
    body();
  } catch (const Error& error) {
    message = fmt::format("{}rank {}: {}", static_cast<char>(error.status()), group.rank(), error.what());
  }
  message = broadcast_first_text(group, message, name);
  if (!message.empty()) throw Error(message.substr(1), static_cast<ExitStatus>(message.front()));
}

bool wait_together(ProcessGroup& group, std::string_view name, const std::future<void>& task, double seconds) {
  constexpr std::chrono::milliseconds kBetweenVotes{100};
  const Stopwatch since_begin;
  while (true) {
    const bool waits = task.valid() && task.wait_for(kBetweenVotes) == std::future_status::timeout;
    double votes[] = {waits ? 1.0 : 0.0, since_begin.seconds() > seconds ? 1.0 : 0.0};
    group.all_reduce(votes, name);
    if (votes[0] == 0.0) return true;
    if (votes[1] > 0.0) return false;
  }
}

void run_long_together(ProcessGroup& group, std::string_view name, const std::function<void()>& body) {
  if (group.size() == 1) return body();
  std::future<void> task = std::async(std::launch::async, body);
  wait_together(group, name, task);
  run_together(group, name, [&] { task.get(); });
}

void run_steps_together(ProcessGroup& group, std::string_view name, const std::function<bool()>& step) {
  constexpr double kSecondsBetweenVotes = 1.0;
  bool goes_on = true;
  std::exception_ptr error;
  while (true) {
    const Stopwatch since_vote;
    while (goes_on && since_vote.seconds() < kSecondsBetweenVotes) {
      try {
        goes_on = step();
      } catch (const Error&) {
        error = std::current_exception();
        goes_on = false;
      }
    }
    double votes[] = {goes_on ? 1.0 : 0.0, error ? 1.0 : 0.0};
    group.all_reduce(votes, name);
    if (votes[0] == 0.0 || votes[1] > 0.0) break;
  }
  run_together(group, name, [&] {
    if (error) std::rethrow_exception(error);
  });
}

}  // namespace tessera
