// The one place where the CPU backend starts threads.
//
// A task must write only what no other task of the same call writes. Then the result does not depend on the
// number of threads, because the cut into tasks never does: callers cut by problem size, not by thread count.
#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#if defined(__SANITIZE_THREAD__)
#include <thread>
#include <vector>
#endif

namespace tessera {

/// Number of threads that parallel_for uses at most.
inline int num_threads() { return omp_get_max_threads(); }

/// Cores that this process may use.
inline int num_cores() { return omp_get_num_procs(); }

/// Sets the number of threads of parallel_for and of the GEMM library, no more than OMP_THREAD_LIMIT. OpenMP then gives
/// all of them, whatever OMP_DYNAMIC and OMP_MAX_ACTIVE_LEVELS say: oneDNN 2 leaves out the work of threads that were
/// promised and do not come.
inline void set_num_threads(int count) {
  omp_set_dynamic(0);
  omp_set_max_active_levels(std::max(omp_get_max_active_levels(), 1));
  omp_set_num_threads(std::min(count, omp_get_thread_limit()));
}

namespace detail {

#if defined(__SANITIZE_THREAD__)
// The thread sanitizer does not see how GCC's OpenMP runtime, which is not instrumented, forks and joins. Under it the
// team is made of plain threads.
inline thread_local int team_idx = 0;
inline thread_local bool in_team = false;

template <typename Body>
void run_team(int size, Body&& body) {
  std::vector<std::thread> team;
  for (int i = 0; i < size; ++i) {
    team.emplace_back([&body, i] {
      team_idx = i;
      in_team = true;
      body();
    });
  }
  for (std::thread& thread : team) thread.join();
}
inline int team_thread_idx() { return team_idx; }
inline bool inside_team() { return in_team; }
#else
template <typename Body>
void run_team(int size, Body&& body) {
#pragma omp parallel num_threads(size)
  body();
}
inline int team_thread_idx() { return omp_get_thread_num(); }
inline bool inside_team() { return omp_in_parallel() != 0; }
#endif

}  // namespace detail

/// Index of the calling thread inside parallel_for, in [0, num_threads()).
inline int thread_idx() { return detail::team_thread_idx(); }

/// Calls `task(i)` for every i in [0, num_tasks), on all threads, in no particular order; tasks are handed out
/// one by one. Rethrows one exception, if any task threw, after all threads have come to rest. Not nestable:
/// inside a task, parallel_for runs serially.
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
  detail::run_team(static_cast<int>(std::min<std::int64_t>(num_tasks, num_threads())), [&] {
    try {
      for (std::int64_t i = next.fetch_add(1); i < num_tasks; i = next.fetch_add(1)) task(i);
    } catch (...) {
      if (!failed.exchange(true)) error = std::current_exception();
    }
  });
  if (error) std::rethrow_exception(error);
}

/// Calls `task(begin, end)` over [0, size) in ranges of `grain` elements (the last one may be shorter).
template <typename Task>
void parallel_ranges(std::int64_t size, std::int64_t grain, Task&& task) {
  parallel_for((size + grain - 1) / grain, [&](std::int64_t i) { task(i * grain, std::min(size, (i + 1) * grain)); });
}

}  // namespace tessera
