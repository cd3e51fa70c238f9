#include "run/state/copy_placement.h"

#include <gmock/gmock.h>

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

/// Ranks with these pairs of node and shard, as rank `own_rank` sees them.
CopyPlacement place(const std::vector<std::pair<std::uint64_t, std::int64_t>>& ranks, int own_rank) {
  std::vector<CopyPlacement::Rank> all;
  for (const auto& [node, shard] : ranks) all.push_back({.node = node, .shard = shard});
  return {all, own_rank};
}

std::vector<int> partners_in(const CopyPlacement& placement, int num_ranks) {
  std::vector<int> partners;
  for (int rank = 0; rank < num_ranks; ++rank) partners.push_back(placement.of(rank).partner);
  return partners;
}

TEST(CopyPlacement, EveryStateIsOnTwoNodes) {
  const CopyPlacement placement = place({{7, 0}, {7, 1}, {9, 2}, {9, 3}, {9, 4}}, 0);
  EXPECT_EQ(placement.num_nodes(), 2);
  EXPECT_THAT(partners_in(placement, 5), ElementsAre(2, 3, 0, 1, 0));
  EXPECT_THAT(placement.sources(), ElementsAre(2, 4));
  EXPECT_THAT(placement.neighbours(), ElementsAre(0, 1));
  EXPECT_THAT(placement.owners_on_node(), ElementsAre(0, 1, 2, 3, 4));
}

TEST(CopyPlacement, AReplicaOnAnotherNodeIsTheSecondCopy) {
  const CopyPlacement placement = place({{7, 0}, {7, 1}, {9, 0}, {9, 1}}, 3);
  EXPECT_THAT(partners_in(placement, 4), ElementsAre(-1, -1, -1, -1));
  EXPECT_THAT(placement.sources(), IsEmpty());
  EXPECT_THAT(placement.owners_on_node(), ElementsAre(2, 3));
}

TEST(CopyPlacement, RanksOfANodeWithTheSameStateKeepOneCopy) {
  const CopyPlacement placement = place({{7, 0}, {7, 0}, {9, 1}, {9, 1}}, 3);
  EXPECT_TRUE(placement.of(0).keeps);
  EXPECT_FALSE(placement.of(1).keeps);
  EXPECT_FALSE(placement.own().keeps);
  EXPECT_THAT(partners_in(placement, 4), ElementsAre(2, -1, 0, -1));
  EXPECT_THAT(placement.owners_on_node(), ElementsAre(0, 2));
}

TEST(CopyPlacement, OneNodeHasNoPartners) {
  const CopyPlacement placement = place({{7, 0}, {7, 1}}, 1);
  EXPECT_EQ(placement.num_nodes(), 1);
  EXPECT_THAT(partners_in(placement, 2), ElementsAre(-1, -1));
  EXPECT_THAT(placement.owners_on_node(), ElementsAre(0, 1));
}

}  // namespace
}  // namespace tessera
