#include "launch/watch/monitor.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/stopwatch.h"
#include "base/unix_time.h"
#include "base/version.h"
#include "launch/watch/channel.h"
#include "launch/watch/protocol.h"
#include "system/file_lock.h"
#include "system/host_name.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;

/// Has a descriptor that becomes readable when the process ends.
class ProcessHandle {
 public:
  explicit ProcessHandle(pid_t pid) : descriptor_(static_cast<int>(syscall(SYS_pidfd_open, pid, 0))) {}
  ~ProcessHandle() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  ProcessHandle(const ProcessHandle&) = delete;
  ProcessHandle& operator=(const ProcessHandle&) = delete;

  int descriptor() const { return descriptor_; }
  bool is_over() const {
    pollfd item = {.fd = descriptor_, .events = POLLIN, .revents = 0};
    return descriptor_ < 0 || poll(&item, 1, 0) > 0;
  }

 private:
  int descriptor_;
};

/// Returns the attempt that a process of this run belongs to, from its environment, or 0 if it belongs to none.
std::int64_t attempt_of(pid_t pid, const std::string& run_id) {
  std::ifstream file(fmt::format("/proc/{}/environ", pid));
  const std::string wanted = fmt::format("{}={}:", kAttemptVariable, run_id);
  std::int64_t attempt = 0;
  for (std::string variable; std::getline(file, variable, '\0');) {
    if (variable.starts_with(wanted)) {
      std::from_chars(variable.data() + wanted.size(), variable.data() + variable.size(), attempt);
    }
  }
  return attempt;
}

/// Returns whether a health daemon that calls its node by this name runs on this node. If several nodes share the
/// daemon's folder by mistake, one of them must not answer for all.
bool is_this_node(const std::string& name, const MonitorOptions& options) {
  const char* in_daemon = std::getenv(kHealthNodeVariable);
  return name == options.node || name == host_name() || (in_daemon != nullptr && name == in_daemon);
}

/// After this many times lonely_seconds, nobody can need the node folder any more.
constexpr double kForgotten = 30.0;
/// A longer pause between two polls means that this process was suspended, as by `scontrol suspend`.
constexpr double kLongestPause = 2.0 * std::chrono::duration<double>(kBetweenBeats).count();

class Monitor {
 public:
  explicit Monitor(const MonitorOptions& options)
      : options_(options),
        channel_(options.node, options.endpoint, options.key),
        lock_(made_folder(options) / "monitor.lock", "the node folder",
              {.owner = options.node, .takes_over = [](const std::string&) { return true; }}) {}

  int run() {
    say_hello();
    while (!quits_) {
      std::vector<int> descriptors;
      if (!input_has_ended_) descriptors.push_back(STDIN_FILENO);
      for (const auto& [path, process] : processes_) {
        if (process->descriptor() >= 0 && !process->is_over()) descriptors.push_back(process->descriptor());
      }
      channel_.wait(std::max(milliseconds(0), kBetweenBeats - milliseconds_of(since_beat_)), descriptors);
      // The launcher may have been suspended together with this process, so most of a suspension does not count as
      // silence.
      silent_seconds_ += std::min(since_looked_.seconds(), kLongestPause);
      since_looked_ = {};
      while (const std::optional<Message> message = channel_.receive()) obey(message->body);
      if (!lock_.is_held()) return 0;  // the node has another monitor now, with the same name
      const bool is_lonely = silent_seconds_ > options_.lonely_seconds;
      was_given_up_ = was_given_up_ || is_lonely;
      input_has_ended_ = input_has_ended_ || input_has_ended();
      if (is_lonely || input_has_ended_) end_ranks(attempt_);
      // A launcher that was lost is followed by another one, which needs the copies in memory. A launcher that was
      // silent before its connection ended may be lost, too. Or it has given the node up, and the copies do not count:
      // if nobody comes for them, they are deleted.
      if (input_has_ended_ && !was_given_up_) return 0;
      if (silent_seconds_ > kForgotten * options_.lonely_seconds) {
        delete_folder();
        return 0;
      }
      // The launcher answers each beat. Its answer must not cause the next beat.
      const auto num_over = std::ranges::count_if(processes_, [](const auto& item) { return item.second->is_over(); });
      if (std::exchange(num_over_, num_over) == num_over && milliseconds_of(since_beat_) < kBetweenBeats) continue;
      since_beat_ = {};
      beat();
    }
    return 0;
  }

 private:
  static milliseconds milliseconds_of(const Stopwatch& watch) {
    return milliseconds(static_cast<std::int64_t>(1e3 * watch.seconds()));
  }

  static const fs::path& made_folder(const MonitorOptions& options) {
    fs::create_directories(options.folder);
    fs::permissions(options.folder, fs::perms::owner_all);
    return options.folder;
  }

  void say_hello() { channel_.send({{"say", "hello"}, {"version", version()}, {"health", health()}}); }

  /// Returns what the node's health daemon has last reported, or null if it reports nothing.
  const nlohmann::json& health() {
    constexpr double kBetweenReadings = 1.0;
    if (since_health_ && since_health_->seconds() < kBetweenReadings) return health_;
    since_health_.emplace();
    health_ = nullptr;
    try {
      const std::optional<NodeVerdict> verdict = read_verdict(options_.health_folder);
      if (verdict && is_this_node(verdict->node, options_) && verdict->is_fresh(unix_time())) {
        health_ = {{"is_bad", verdict->level == HealthLevel::kBad},
                   {"reason", verdict->reason},
                   {"active_check", verdict->active_check}};
      }
    } catch (const Error&) {  // NOLINT(bugprone-empty-catch): a damaged file says nothing of the node
    }
    return health_;
  }

  void obey(const nlohmann::json& order) {
    silent_seconds_ = 0.0;
    const std::string what = order.value("do", "");
    const std::int64_t attempt = order.value("attempt", std::int64_t{0});
    if (what == "watch" && attempt > attempt_) {
      end_ranks(attempt - 1);
      attempt_ = attempt;
      was_given_up_ = false;  // the node takes part again
      processes_.clear();
    } else if (what == "gather") {
      send_evidence(attempt);
    } else if (what == "end") {
      channel_.send({{"say", "ended"}, {"attempt", attempt}, {"left", end_ranks(attempt)}});
    } else if (what == "quit") {
      end_ranks(std::max(attempt, attempt_));
      delete_folder();
      channel_.send({{"say", "quit"}});
      std::this_thread::sleep_for(milliseconds(50));  // until the message is on its way
      quits_ = true;
    }
  }

  void delete_folder() {
    std::error_code kept;
    fs::remove_all(options_.folder, kept);
  }

  /// Returns the files of an attempt's ranks.
  std::vector<fs::path> rank_files(std::int64_t attempt) const {
    std::vector<fs::path> files;
    std::error_code missing;
    for (const auto& entry :
         fs::directory_iterator(rank_file_path(options_.folder, attempt, 0).parent_path(), missing)) {
      files.push_back(entry.path());
    }
    std::ranges::sort(files);
    return files;
  }

  void beat() {
    nlohmann::json ranks = nlohmann::json::array();
    for (const fs::path& path : rank_files(attempt_)) {
      try {
        const RankState state = read_rank_file(path);
        if (state.pid != 0 && !processes_.contains(path)) {
          processes_.emplace(path, std::make_unique<ProcessHandle>(state.pid));
        }
        ranks.push_back(to_json(report_of(state)));
      } catch (const Error&) {  // NOLINT(bugprone-empty-catch): it is being created, and is there in the next beat
      }
    }
    channel_.send({{"say", "beat"}, {"attempt", attempt_}, {"ranks", ranks}, {"health", health()}});
  }

  void send_evidence(std::int64_t attempt) {
    std::vector<std::string> files;
    nlohmann::json processes = nlohmann::json::array();
    for (const fs::path& path : rank_files(attempt)) {
      try {
        processes.push_back(static_cast<int>(read_rank_file(path).process));
      } catch (const Error&) {
        continue;
      }
      std::ifstream file(path, std::ios::binary);
      std::ostringstream bytes;
      bytes << file.rdbuf();
      files.push_back(bytes.str());
    }
    channel_.send({{"say", "evidence"}, {"attempt", attempt}, {"processes", processes}}, files);
  }

  /// Ends every process of the run that belongs to this attempt or an earlier one. Returns the processes that still
  /// exist after two seconds: they hang in the kernel.
  std::vector<pid_t> end_ranks(std::int64_t last_attempt) {
    const Stopwatch watch;
    std::vector<pid_t> left;
    do {
      left.clear();
      std::error_code unreadable;
      for (fs::directory_iterator entry("/proc", unreadable), end; entry != end; entry.increment(unreadable)) {
        const std::string name = entry->path().filename().string();
        pid_t pid = 0;
        if (std::from_chars(name.data(), name.data() + name.size(), pid).ec != std::errc()) continue;
        const std::int64_t attempt = pid == ::getpid() ? 0 : attempt_of(pid, options_.run_id);
        if (attempt == 0 || attempt > last_attempt || state_of_process(pid, 0) == ProcessState::kEnded) continue;
        kill(pid, SIGKILL);
        left.push_back(pid);
      }
      if (left.empty() && !unreadable) break;
      std::this_thread::sleep_for(milliseconds(10));
    } while (watch.seconds() < 2.0);
    return left;
  }

  static bool input_has_ended() {
    pollfd item = {.fd = STDIN_FILENO, .events = POLLIN, .revents = 0};
    if (poll(&item, 1, 0) <= 0) return false;
    char text = 0;
    return read(STDIN_FILENO, &text, 1) <= 0;
  }

  const MonitorOptions& options_;
  MonitorChannel channel_;
  FileLock lock_;
  std::int64_t attempt_ = 0;
  std::map<fs::path, std::unique_ptr<ProcessHandle>> processes_;  // of the current attempt, by the rank's file
  std::ptrdiff_t num_over_ = 0;                                   // how many of these processes have ended
  Stopwatch since_beat_;
  Stopwatch since_looked_;
  double silent_seconds_ = 0.0;  // since the launcher's last message; a pause counts for kLongestPause at most
  bool was_given_up_ = false;    // the launcher was silent for too long
  bool input_has_ended_ = false;
  bool quits_ = false;
  nlohmann::json health_;
  std::optional<Stopwatch> since_health_;  // not set: it was not read yet
};

}  // namespace

int run_monitor(const MonitorOptions& options) {
  // The launcher answers a terminal's Ctrl-C, so the monitor ignores it.
  for (const int signal : {SIGINT, SIGHUP, SIGPIPE}) std::signal(signal, SIG_IGN);
  return Monitor(options).run();
}

}  // namespace tessera
