// Runs loops of the CPU backend on several threads. No other code of that backend starts threads.
//
// A task must write only what no other task of the same call writes. Results then do not depend on the number of
// threads: callers cut work into tasks by problem size, never by thread count.
#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>

namespace tessera {

/// Returns how many threads parallel_for uses at most when the calling thread calls it. The default is OMP_NUM_THREADS,
/// or num_cores() if that is not set, and at most OMP_THREAD_LIMIT.
int num_threads();

/// Returns the number of cores that this process may use: those it may run on, limited by a container's share of
/// processor time.
int num_cores();

/// Sets num_threads() for the calling thread: at least to 1, at most to OMP_THREAD_LIMIT.
void set_num_threads(int count);

namespace detail {

/// Calls body(argument) on the calling thread and on up to size - 1 workers, which it keeps for later calls. If a
/// worker has not begun when the calling thread has finished, it does not call `body`, and nobody waits for it.
void run_team(int size, void (*body)(void*), void* argument);
int team_thread_idx();
bool inside_team();

}  // namespace detail

/// Returns the index of the calling thread inside parallel_for, in [0, num_threads()).
inline int thread_idx() { return detail::team_thread_idx(); }

/// Calls `task(i)` for every i in [0, num_tasks), on all threads and in no particular order. Threads take tasks one by
/// one. If tasks throw, it rethrows one exception after all threads have stopped. It does not nest: inside a task,
/// parallel_for runs serially.
template <typename Task>
void parallel_for(std::int64_t num_tasks, Task&& task) {
  if (num_tasks <= 0) return;
  if (num_tasks == 1 || num_threads() == 1 || detail::inside_team()) {
    for (std::int64_t i = 0; i < num_tasks; ++i) task(i);
    return;
  }
  std::atomic<std::int64_t> next{0};
  std::exception_ptr error;
  std::atomic<bool> failed{false};
  auto take_tasks = [&] {
    try {
      for (std::int64_t i = next.fetch_add(1); i < num_tasks; i = next.fetch_add(1)) task(i);
    } catch (...) {
      if (!failed.exchange(true)) error = std::current_exception();
    }
  };
  detail::run_team(
      static_cast<int>(std::min<std::int64_t>(num_tasks, num_threads())),
      [](void* argument) { (*static_cast<decltype(take_tasks)*>(argument))(); }, &take_tasks);
  if (error) std::rethrow_exception(error);
}

/// Calls `task(begin, end)` over [0, size) in ranges of `grain` elements (the last one may be shorter).
template <typename Task>
void parallel_ranges(std::int64_t size, std::int64_t grain, Task&& task) {
  parallel_for((size + grain - 1) / grain, [&](std::int64_t i) { task(i * grain, std::min(size, (i + 1) * grain)); });
}

}  // namespace tessera
