#include "run/rank_setup.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>

#include "tensor/parallel.h"
#include "tests/comm/ranks.h"

namespace tessera {
namespace {

std::int64_t max_ranks(const std::vector<int>& node_of_rank, std::int64_t ep) {
  return max_ranks_per_domain(node_of_rank, ep);
}

TEST(RankSetup, ADomainIsOnOneNode) {
  EXPECT_EQ(max_ranks({0}, 1), 1);
  EXPECT_EQ(max_ranks({0, 0, 0, 0}, 4), 4);
  EXPECT_EQ(max_ranks({0, 0, 0, 0, 4, 4, 4, 4}, 8), 4);
  EXPECT_EQ(max_ranks({0, 0, 0, 0, 4, 4, 4, 4}, 4), 4);
  EXPECT_EQ(max_ranks({0, 0, 0, 0, 4, 4, 4, 4}, 2), 2);
  // Groups of 6 ranks are on nodes of 4, and on nodes of 4 and of 2.
  EXPECT_EQ(max_ranks({0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8}, 6), 2);
  EXPECT_EQ(max_ranks({0, 0, 0, 0, 4, 4}, 6), 2);
  // Ranks are placed round robin, and groups have 3 ranks.
  EXPECT_EQ(max_ranks({0, 1, 0, 1}, 4), 1);
  EXPECT_EQ(max_ranks({0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8}, 3), 1);
}

/// `srun -n4 -c8` gives each rank cores of its own. Without binding, the ranks of a node share all of them.
TEST(RankSetup, OnlyRanksOfANodeWithTheSameCoresShareThem) {
  const std::vector<int> nodes = {0, 0, 0, 0, 4, 4, 4, 4};
  const std::vector<std::uint64_t> bound = {1, 2, 3, 4, 1, 2, 3, 4}, free(8, 9), in_pairs = {1, 1, 2, 2, 1, 1, 2, 2};
  for (int rank = 0; rank < 8; ++rank) {
    EXPECT_EQ(num_sharing_cores(nodes, bound, rank), 1);
    EXPECT_EQ(num_sharing_cores(nodes, free, rank), 4);
    EXPECT_EQ(num_sharing_cores(nodes, in_pairs, rank), 2);
  }
}

/// These ranks are threads that may all run on the same cores.
TEST(RankSetup, RanksShareTheirCores) {
  const auto threads_of_ranks = [](const char* omp_num_threads) {
    if (omp_num_threads != nullptr) setenv("OMP_NUM_THREADS", omp_num_threads, 1);
    std::vector<int> counts(2);
    comm_test::on_ranks(2, [&](Ranks& ranks) {
      set_num_threads(3);  // as if OMP_NUM_THREADS had been 3 when the program began
      set_threads(JobConfig(), ranks);
      counts[static_cast<std::size_t>(ranks.rank())] = num_threads();
    });
    unsetenv("OMP_NUM_THREADS");
    return counts;
  };
  EXPECT_THAT(threads_of_ranks(nullptr), ::testing::Each(std::max(1, num_cores() / 2)));
  EXPECT_THAT(threads_of_ranks("3"), ::testing::Each(3));
}

}  // namespace
}  // namespace tessera
