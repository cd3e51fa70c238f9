#include "tensor/parallel.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <vector>

namespace tessera {
namespace {

class Parallel : public ::testing::TestWithParam<int> {
 protected:
  Parallel() : before_(num_threads()) { set_num_threads(GetParam()); }
  ~Parallel() override { set_num_threads(before_); }

 private:
  int before_;
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

TEST_P(Parallel, NestedRunsSerially) {
  std::vector<int> sums(8, 0);
  parallel_for(8, [&](std::int64_t i) {
    parallel_for(10, [&](std::int64_t j) { sums[static_cast<std::size_t>(i)] += static_cast<int>(j); });
  });
  EXPECT_EQ(sums, std::vector<int>(8, 45));
}

INSTANTIATE_TEST_SUITE_P(Threads, Parallel, ::testing::Values(1, 2, 4));

}  // namespace
}  // namespace tessera
