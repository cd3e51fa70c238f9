#include "comm/together.h"

#include <algorithm>
#include <chrono>
#include <cstring>

namespace tessera {

std::string first_text(ProcessGroup& group, const std::string& text, std::string_view name) {
  const auto own_size = static_cast<double>(text.size());
  const std::vector<double> sizes = group.all_gather(std::span(&own_size, 1), name);
  const auto first = std::find_if(sizes.begin(), sizes.end(), [](double size) { return size > 0.0; });
  if (first == sizes.end()) return {};
  std::string found = text;
  found.resize(static_cast<std::size_t>(*first));
  // Broadcasts move tensors: whole words, of which the last may be filled up.
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
  std::string message;  // behind a first character that is the exit status
  try {
    body();
  } catch (const Error& error) {
    message = fmt::format("{}rank {}: {}", static_cast<char>(error.status()), group.rank(), error.what());
  }
  message = first_text(group, message, name);
  if (!message.empty()) throw Error(message.substr(1), static_cast<ExitStatus>(message.front()));
}

void wait_together(ProcessGroup& group, std::string_view name, const std::future<void>& task) {
  constexpr std::chrono::milliseconds kBetweenVotes{100};
  for (double num_waiting = 1.0; num_waiting > 0.0;) {
    const bool waits = task.valid() && task.wait_for(kBetweenVotes) == std::future_status::timeout;
    num_waiting = waits ? 1.0 : 0.0;
    group.all_reduce(std::span(&num_waiting, 1), name);
  }
}

void run_long_together(ProcessGroup& group, std::string_view name, const std::function<void()>& body) {
  if (group.size() == 1) return body();
  std::future<void> task = std::async(std::launch::async, body);
  wait_together(group, name, task);
  run_together(group, name, [&] { task.get(); });
}

}  // namespace tessera
