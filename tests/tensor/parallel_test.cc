#include "tensor/parallel.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <stdexcept>
#include <thread>
#include <vector>

#include "tests/threads_scope.h"

namespace tessera {
namespace {

class Parallel : public ::testing::TestWithParam<int> {
 protected:
 private:
  ThreadsScope threads_{GetParam()};
};

TEST_P(Parallel, RunsEachTaskOnce) {
  for (const std::int64_t count : {0, 1, 2, 1000}) {
    std::vector<int> runs(static_cast<std::size_t>(count), 0);
    parallel_for(count, [&](std::int64_t i) {
      ++runs[static_cast<std::size_t>(i)];
      EXPECT_LT(thread_idx(), num_threads());
    });
    EXPECT_EQ(runs, std::vector<int>(static_cast<std::size_t>(count), 1));
  }
}

TEST_P(Parallel, RangesCoverAllWithATail) {
  std::vector<int> runs(103, 0);
  parallel_ranges(103, 10, [&](std::int64_t begin, std::int64_t end) {
    EXPECT_LE(end - begin, 10);
    for (std::int64_t i = begin; i < end; ++i) ++runs[static_cast<std::size_t>(i)];
  });
  EXPECT_EQ(runs, std::vector<int>(103, 1));
}

TEST_P(Parallel, RethrowsOneException) {
  EXPECT_THROW(parallel_for(100,
                            [](std::int64_t i) {
                              if (i % 7 == 3) throw std::runtime_error("task");
                            }),
               std::runtime_error);
}

// The caller gets the exception unchanged. By then no task runs, none ran twice, and the next call works.
TEST_P(Parallel, ExceptionsLeaveNothingBehind) {
  std::vector<std::atomic<int>> runs(200);
  std::atomic<int> running{0};
  try {
    parallel_for(200, [&](std::int64_t i) {
      ++running;
      ++runs[static_cast<std::size_t>(i)];
      --running;
      if (i == 17) throw std::out_of_range("17");
    });
    ADD_FAILURE() << "nothing thrown";
  } catch (const std::out_of_range& error) {
    EXPECT_STREQ(error.what(), "17");
  }
  EXPECT_EQ(running, 0);
  for (const auto& count : runs) EXPECT_LE(count, 1);
  EXPECT_EQ(runs[17], 1);
  std::atomic<int> sum{0};
  parallel_for(50, [&](std::int64_t) { ++sum; });
  EXPECT_EQ(sum, 50);
}

// There are as many tasks as threads, and each waits for the others, so they end only if all run at once. Each has its
// own thread.
TEST_P(Parallel, TasksRunAtTheSameTime) {
  std::vector<int> threads(static_cast<std::size_t>(num_threads()), -1);
  std::atomic<int> arrived{0};
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  parallel_for(num_threads(), [&](std::int64_t i) {
    threads[static_cast<std::size_t>(i)] = thread_idx();
    ++arrived;
    while (arrived < num_threads() && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
  });
  EXPECT_LT(std::chrono::steady_clock::now(), deadline);
  std::sort(threads.begin(), threads.end());
  for (std::size_t i = 0; i < threads.size(); ++i) EXPECT_EQ(threads[i], static_cast<int>(i));
}

TEST_P(Parallel, NestedRunsSerially) {
  std::vector<int> sums(8, 0);
  parallel_for(8, [&](std::int64_t i) {
    parallel_for(10, [&](std::int64_t j) { sums[static_cast<std::size_t>(i)] += static_cast<int>(j); });
  });
  EXPECT_EQ(sums, std::vector<int>(8, 45));
}

/// Each is read when a program starts, so the test starts itself again.
TEST(NumThreads, DefaultIsAtMostTheThreadLimit) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  setenv("OMP_NUM_THREADS", "8", 1);
  setenv("OMP_THREAD_LIMIT", "3", 1);
  EXPECT_EXIT(std::exit(num_threads()), ::testing::ExitedWithCode(3), "");
  unsetenv("OMP_NUM_THREADS");
  unsetenv("OMP_THREAD_LIMIT");
}

INSTANTIATE_TEST_SUITE_P(Threads, Parallel, ::testing::Values(1, 2, 4));

}  // namespace
}  // namespace tessera
