#include "run/rank_setup.h"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace tessera
