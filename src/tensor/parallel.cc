#include "tensor/parallel.h"

#include <sched.h>

#include <chrono>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#include "system/control_groups.h"

namespace tessera {
namespace {

/// How long a thread spins for work, or for the others to finish, before it sleeps. It is longer than most pauses
/// between two calls, since waking up takes as long. It is short, since another program may need the core.
constexpr std::chrono::microseconds kSpin(50);

enum State : std::uint32_t { kIdle, kPosted, kRunning, kStopped };

/// Waits while the state is `state`.
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

/// Returns the cores that the calling thread may run on.
cpu_set_t allowed_cores() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  sched_getaffinity(0, sizeof(allowed), &allowed);
  return allowed;
}

/// Moves the calling thread away from `core`, if it runs there and may run elsewhere. With three busy threads on two
/// cores, Linux sees no gain in moving one of them, whichever two share a core. Without this, a team's threads could
/// share a core for seconds while another program has the other core to itself.
void leave_core(int core, int team_idx) {
  if (sched_getcpu() != core) return;
  const cpu_set_t allowed = allowed_cores();
  const int others = CPU_COUNT(&allowed) - 1;
  if (others < 1) return;
  int skipped = 0;
  for (int other = 0; other < CPU_SETSIZE; ++other) {
    if (other == core || !CPU_ISSET(other, &allowed) || skipped++ < (team_idx - 1) % others) continue;
    cpu_set_t only_that;
    CPU_ZERO(&only_that);
    CPU_SET(other, &only_that);
    sched_setaffinity(0, sizeof(only_that), &only_that);
    sched_setaffinity(0, sizeof(allowed), &allowed);  // from now on Linux may move the thread anywhere again
    return;
  }
}

thread_local int most_threads = std::min(
    std::getenv("OMP_NUM_THREADS") == nullptr ? std::min(omp_get_max_threads(), num_cores()) : omp_get_max_threads(),
    omp_get_thread_limit());
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

  /// Hands `body` to the worker. `core` is the core that the caller runs on.
  void post(void (*body)(void*), void* argument, int core) {
    body_ = body;
    argument_ = argument;
    most_threads_ = most_threads;
    core_of_caller_ = core;
    set(kPosted);
  }
  /// Takes back what was posted if the worker has not begun; otherwise waits until the worker has finished.
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
        leave_core(core_of_caller_, idx);
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
  int core_of_caller_ = -1;
  std::thread thread_;  // last, because the thread uses the other members
};

thread_local std::vector<std::unique_ptr<Worker>> team;  // the workers of the calling thread

}  // namespace

int num_threads() { return most_threads; }

int num_cores() {
  static const int cores = [] {
    const int allowed = omp_get_num_procs();
    const double share = control_group_limits().cores.value_or(allowed);
    return std::clamp(static_cast<int>(std::ceil(share)), 1, allowed);
  }();
  return cores;
}

void set_num_threads(int count) { most_threads = std::clamp(count, 1, omp_get_thread_limit()); }

namespace detail {

void run_team(int size, void (*body)(void*), void* argument) {
  const auto others = static_cast<std::size_t>(size - 1);
  while (team.size() < others) team.push_back(std::make_unique<Worker>(static_cast<int>(team.size()) + 1));
  const int core = sched_getcpu();
  for (std::size_t i = 0; i < others; ++i) team[i]->post(body, argument, core);
  in_team = true;
  body(argument);
  in_team = false;
  for (std::size_t i = 0; i < others; ++i) team[i]->finish();
}
int team_thread_idx() { return team_idx; }
bool inside_team() { return in_team; }

}  // namespace detail
}  // namespace tessera
