#include "tensor/parallel.h"

#include <chrono>
#include <memory>
#include <thread>
#include <vector>

namespace tessera {
namespace {

/// How long a thread looks for work, or for the end of others' work, before it sleeps: longer than most pauses between
/// two calls, since waking up takes as long; short, since another program may need the core.
constexpr std::chrono::microseconds kSpin(50);

enum State : std::uint32_t { kIdle, kPosted, kRunning, kStopped };

/// Returns when the state is no longer `state`.
void wait_while(const std::atomic<std::uint32_t>& current, State state) {
  const auto end = std::chrono::steady_clock::now() + kSpin;
  while (std::chrono::steady_clock::now() < end) {
    for (int i = 0; i < 32; ++i) {
      if (current.load(std::memory_order_acquire) != state) return;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
  }
  current.wait(state, std::memory_order_acquire);
}

thread_local int most_threads = omp_get_max_threads();
thread_local int team_idx = 0;
thread_local bool in_team = false;

class Worker {
 public:
  explicit Worker(int idx) : thread_([this, idx] { work(idx); }) {}
  ~Worker() {
    set(kStopped);
    thread_.join();
  }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  void post(void (*body)(void*), void* argument) {
    body_ = body;
    argument_ = argument;
    most_threads_ = most_threads;
    set(kPosted);
  }
  /// Takes back what was posted; if the worker has begun, waits for its end.
  void finish() {
    std::uint32_t posted = kPosted;
    if (!state_.compare_exchange_strong(posted, kIdle)) wait_while(state_, kRunning);
  }

 private:
  void set(State state) {
    state_.store(state);
    state_.notify_all();
  }
  void work(int idx) {
    team_idx = idx;
    in_team = true;
    while (true) {
      wait_while(state_, kIdle);
      std::uint32_t posted = kPosted;
      if (state_.compare_exchange_strong(posted, kRunning)) {
        most_threads = most_threads_;
        body_(argument_);
        set(kIdle);
      } else if (posted == kStopped) {
        return;
      }
    }
  }

  alignas(64) std::atomic<std::uint32_t> state_{kIdle};
  void (*body_)(void*) = nullptr;
  void* argument_ = nullptr;
  int most_threads_ = 1;
  std::thread thread_;  // last: it uses the others
};

thread_local std::vector<std::unique_ptr<Worker>> team;  // the calling thread's

}  // namespace

int num_threads() { return most_threads; }

void set_num_threads(int count) { most_threads = std::min(count, omp_get_thread_limit()); }

namespace detail {

void run_team(int size, void (*body)(void*), void* argument) {
  const auto others = static_cast<std::size_t>(size - 1);
  while (team.size() < others) team.push_back(std::make_unique<Worker>(static_cast<int>(team.size()) + 1));
  for (std::size_t i = 0; i < others; ++i) team[i]->post(body, argument);
  in_team = true;
  body(argument);
  in_team = false;
  for (std::size_t i = 0; i < others; ++i) team[i]->finish();
}
int team_thread_idx() { return team_idx; }
bool inside_team() { return in_team; }

}  // namespace detail
}  // namespace tessera
