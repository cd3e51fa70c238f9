#include "launch/watch/background_writer.h"

#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>

#include "base/error.h"
#include "base/file.h"
#include "base/log.h"

namespace tessera {

struct BackgroundWriter::State {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::filesystem::path, std::string> waiting;
  bool is_writing = false, ends = false;

  void run() {
    std::unique_lock lock(mutex);
    while (true) {
      changed.wait(lock, [this] { return !waiting.empty() || ends; });
      if (waiting.empty()) return;
      const auto [path, text] = *waiting.begin();
      waiting.erase(waiting.begin());
      is_writing = true;
      lock.unlock();
      try {
        create_folder(path.parent_path());
        write_whole_file(path, text);
      } catch (const Error& error) {
        spdlog::warn("{}", error.what());
      }
      lock.lock();
      is_writing = false;
      changed.notify_all();
    }
  }
};

BackgroundWriter::BackgroundWriter() : state_(std::make_shared<State>()) {
  std::thread([state = state_] { state->run(); }).detach();
}

BackgroundWriter::~BackgroundWriter() {
  std::unique_lock lock(state_->mutex);
  state_->ends = true;
  state_->changed.notify_all();
  state_->changed.wait_for(lock, std::chrono::seconds(2),
                           [this] { return state_->waiting.empty() && !state_->is_writing; });
}

void BackgroundWriter::write(const std::filesystem::path& path, std::string text) {
  const std::lock_guard lock(state_->mutex);
  state_->waiting[path] = std::move(text);
  state_->changed.notify_all();
}

}  // namespace tessera
