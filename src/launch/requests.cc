#include "launch/requests.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/file.h"
#include "base/log.h"
#include "base/stopwatch.h"
#include "base/unix_time.h"
#include "launch/launch_files.h"
#include "launch/launch_state.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr const char* kUndrain = ".undrain";

fs::path undrain_path(const fs::path& dump_folder, const std::string& node) {
  return dump_folder / kRequestsFolderName / (node + kUndrain);
}

}  // namespace

struct RequestInbox::State {
  fs::path folder;
  std::mutex mutex;
  std::condition_variable ending;
  std::vector<std::string> undrained;
  bool ends = false;

  void run() {
    bool is_told = false;  // a warning says that the storage fails
    std::unique_lock lock(mutex);
    while (!ends) {
      lock.unlock();
      std::vector<std::string> found;
      try {
        create_folder(folder);
        for (const auto& entry : fs::directory_iterator(folder)) {
          if (entry.path().extension() == kUndrain && fs::remove(entry.path())) found.push_back(entry.path().stem());
        }
        is_told = false;
      } catch (const std::exception& error) {  // the storage may fail for a while
        if (!is_told) spdlog::warn("requests to the launcher cannot be read: {}", error.what());
        is_told = true;
      }
      lock.lock();
      undrained.insert(undrained.end(), found.begin(), found.end());
      ending.wait_for(lock, std::chrono::seconds(1), [this] { return ends; });
    }
  }
};

RequestInbox::RequestInbox(const fs::path& dump_folder) : state_(std::make_shared<State>()) {
  state_->folder = dump_folder / kRequestsFolderName;
  std::thread([state = state_] { state->run(); }).detach();
}

RequestInbox::~RequestInbox() {
  const std::lock_guard lock(state_->mutex);
  state_->ends = true;
  state_->ending.notify_all();
}

std::vector<std::string> RequestInbox::take_undrained() {
  const std::lock_guard lock(state_->mutex);
  return std::exchange(state_->undrained, {});
}

void request_undrain(const fs::path& dump_folder, const std::vector<std::string>& nodes, double patience) {
  const std::optional<LaunchState> launch = read_launch_state(dump_folder);
  require(launch.has_value(),
          "'{}' has no {}: expected the folder (job.dump_folder) of a run that tessera launch has started",
          dump_folder.string(), kLaunchStateName);
  const std::string launcher = fmt::format("the launcher on {} (process {})", launch->host, launch->pid);
  require(!launch->has_ended(), "{} has ended: the next tessera launch of this run uses all nodes that it is given",
          launcher);
  const double silent = unix_time() - launch->time;
  require(silent <= patience,
          "{} has been silent for {:.0f} s, expected one that writes '{}' every second. Start it again: it uses all "
          "nodes that it is given",
          launcher, silent, (dump_folder / kLaunchStateName).string());
  for (const std::string& name : nodes) {
    const auto node = std::ranges::find(launch->nodes, name, &LaunchState::Node::name);
    if (node == launch->nodes.end()) {
      std::vector<std::string> names;
      for (const LaunchState::Node& known : launch->nodes) names.push_back(known.name);
      fail("the run has no node '{}'; expected one that is drained, of {}", name, fmt::join(names, ", "));
    }
    require(node->role == "drained", "{} is not drained but {}{}", name, node->role,
            node->role == "lost" ? ": the launcher uses it again by itself once its monitor answers" : "");
  }
  const Stopwatch watch;
  std::vector<fs::path> requests;
  for (const std::string& name : nodes) {
    requests.push_back(undrain_path(dump_folder, name));
    write_whole_file(requests.back(), "");
  }
  const auto waits = [](const fs::path& request) {
    std::error_code unreadable;
    return fs::exists(request, unreadable) || unreadable;
  };
  while (std::ranges::any_of(requests, waits)) {
    if (watch.seconds() > patience) {
      std::error_code gone;
      for (const fs::path& request : requests) fs::remove(request, gone);
      fail("{} has not taken '{}' within {:g} s: look at its log, and ask again", launcher, requests.front().string(),
           patience);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
}

}  // namespace tessera
