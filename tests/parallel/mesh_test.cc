#include "parallel/mesh.h"

#include <gmock/gmock.h>

#include <set>
#include <tuple>

#include "tests/comm/ranks.h"
#include "tests/expect_error.h"

namespace tessera {
namespace {

TEST(Mesh, TheRestGoesToTheShards) {
  EXPECT_EQ(resolve({}, 8).dp_shard, 8);
  EXPECT_EQ(resolve({.cp = 2, .tp = 2}, 8).dp_shard, 2);
  EXPECT_EQ(resolve({.dp_replicate = 2, .dp_shard = 2, .pp = 2}, 8).num_ranks(), 8);
  EXPECT_EQ(resolve({.tp = 4, .ep = 8}, 8).ep, 8);
}

TEST(Mesh, WhatCannotBeNamesTheAxisAndTheNearestValues) {
  expect_error([] { resolve({.tp = 3}, 8); }, {"tensor_parallel_degree is 3", "number of ranks, 8", "2 and 4"});
  expect_error([] { resolve({.tp = 2, .pp = 3}, 12 * 2 + 2); }, {"pipeline_parallel_degree is 3", "26", "2 and 13"});
  expect_error([] { resolve({.cp = 3, .tp = 2}, 8); }, {"context_parallel_degree is 3", "4", "8 ranks", "2 and 4"});
  expect_error([] { resolve({.dp_replicate = 16}, 8); },
               {"data_parallel_replicate_degree is 16", "nearest possible: 8"});
  expect_error([] { resolve({.dp_shard = 3, .tp = 2}, 8); }, {"data_parallel_shard_degree is 3", "leave 4", "-1"});
  expect_error([] { resolve({.tp = 2, .ep = 3}, 8); }, {"expert_parallel_degree is 3", "= 8", "2 and 4"});
  expect_error([] { resolve({.ep = 8, .ep_domain = 3}, 8); },
               {"expert_parallel_ranks_per_domain is 3", "expert_parallel_degree, 8", "2 and 4"});
  expect_error([] { resolve({.ep = 4, .ep_domain = 8}, 8); }, {"expert_parallel_ranks_per_domain is 8", "possible: 4"});
  expect_error([] { resolve({.ep = 4, .ep_domain = 1}, 8); }, {"expert_parallel_ranks_per_domain is 1", "standard"});
  expect_error([] { resolve({.tp = 0}, 8); }, {"tensor_parallel_degree is 0"});
  expect_error([] { resolve({.dp_shard = -2}, 8); }, {"data_parallel_shard_degree is -2"});
}

TEST(Mesh, TheFewestRanksResolve) {
  EXPECT_EQ(fewest_ranks({}), 1);
  EXPECT_EQ(fewest_ranks({.tp = 2}), 2);
  EXPECT_EQ(fewest_ranks({.dp_replicate = 2, .cp = 3, .pp = 2}), 12);
  EXPECT_EQ(fewest_ranks({.tp = 4, .ep = 8}), 8);
  EXPECT_EQ(fewest_ranks({.tp = 4, .ep = 6}), 12);
  EXPECT_EQ(fewest_ranks({.tp = 4, .ep = 2}), 4);
  EXPECT_EQ(fewest_ranks({.dp_shard = 4, .ep = 2}), 4);
  EXPECT_EQ(fewest_ranks({.tp = 1LL << 40, .pp = 1LL << 40}), std::numeric_limits<std::int64_t>::max());
  for (const MeshDegrees& impossible : {MeshDegrees{.tp = 0, .ep = 0}, MeshDegrees{.ep = 0}, MeshDegrees{.tp = -2},
                                        MeshDegrees{.dp_shard = 0}, MeshDegrees{.dp_shard = -2, .tp = 2}}) {
    EXPECT_EQ(fewest_ranks(impossible), 1) << impossible.tp << " " << impossible.ep << " " << impossible.dp_shard;
  }
  for (const std::int64_t ep : {2, 3, 4, 6, 12}) {
    const MeshDegrees degrees{.cp = 2, .tp = 3, .ep = ep};
    EXPECT_EQ(resolve(degrees, fewest_ranks(degrees)).num_ranks(), fewest_ranks(degrees)) << ep;
    EXPECT_NO_THROW(resolve(degrees, 3 * fewest_ranks(degrees))) << ep;
  }
}

TEST(Mesh, DescribesDomains) {
  EXPECT_EQ(describe(resolve({.ep = 8, .ep_domain = 8}, 8)),
            "pipeline 1 x replicate 1 x shard 8 x context 1 x tensor 1, expert 8");
  EXPECT_EQ(describe(resolve({.ep = 8, .ep_domain = 4}, 8)),
            "pipeline 1 x replicate 1 x shard 8 x context 1 x tensor 1, expert 8 in domains of 4");
}

/// Checks the coordinates of all ranks of a mesh, and so what groups are made of.
TEST(Mesh, PlacesAreDistinctAndTensorRanksAreNeighbours) {
  const MeshDegrees degrees = resolve({.dp_replicate = 2, .cp = 2, .tp = 2, .pp = 3, .ep = 4}, 48);
  ASSERT_EQ(degrees.dp_shard, 2);
  std::set<std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t>> places;
  for (std::int64_t rank = 0; rank < 48; ++rank) {
    const MeshPlace p = place_of(degrees, rank);
    EXPECT_TRUE(places.insert({p.pp, p.dp_replicate, p.dp_shard, p.cp, p.tp}).second);
    EXPECT_EQ(p.tp, rank % 2);
    EXPECT_EQ(p.pp, rank / 16);
    EXPECT_EQ(p.ep, rank % 8 % 4);
    EXPECT_EQ(p.ep_shard, rank % 8 / 4);
  }
}

/// Every group holds the ranks that it should. The ranks of a group gather their world ranks, which are compared with
/// the places.
TEST(Mesh, GroupsAlongTheAxes) {
  for (const MeshDegrees& wanted :
       {MeshDegrees{.cp = 2, .tp = 2, .ep = 4}, MeshDegrees{.dp_replicate = 2, .pp = 2},
        MeshDegrees{.tp = 2, .pp = 2, .ep = 2}, MeshDegrees{.dp_shard = 8, .ep = 2},
        MeshDegrees{.cp = 2, .ep = 8, .ep_domain = 2}, MeshDegrees{.tp = 2, .ep = 4, .ep_domain = 2}}) {
    comm_test::with_ranks(8, [&](ProcessGroup& world) {
      const MeshDegrees degrees = resolve(wanted, 8);
      Mesh mesh(world, degrees);
      const MeshPlace& own = mesh.place;
      const auto expect_members = [&](ProcessGroup& group, const auto& belongs) {
        std::vector<double> expected;
        for (std::int64_t rank = 0; rank < 8; ++rank) {
          if (belongs(place_of(degrees, rank))) expected.push_back(static_cast<double>(rank));
        }
        const double rank = world.rank();
        EXPECT_EQ(group.all_gather(std::span(&rank, 1), "test"), expected) << group.axis();
      };
      const auto same_stage = [&](const MeshPlace& p) { return p.pp == own.pp; };
      const auto same_replica = [&](const MeshPlace& p) { return p.dp_replicate == own.dp_replicate; };
      const auto same_stage_and_replica = [&](const MeshPlace& p) { return same_stage(p) && same_replica(p); };
      const auto same_data = [&](const MeshPlace& p) {
        return p.dp_shard == own.dp_shard && p.cp == own.cp && p.tp == own.tp;
      };
      expect_members(mesh.pp, [&](const MeshPlace& p) { return same_replica(p) && same_data(p); });
      expect_members(mesh.dp_replicate, [&](const MeshPlace& p) { return same_stage(p) && same_data(p); });
      expect_members(mesh.tp, [&](const MeshPlace& p) {
        return same_stage_and_replica(p) && p.dp_shard == own.dp_shard && p.cp == own.cp;
      });
      expect_members(mesh.cp, [&](const MeshPlace& p) {
        return same_stage_and_replica(p) && p.dp_shard == own.dp_shard && p.tp == own.tp;
      });
      expect_members(mesh.sequence,
                     [&](const MeshPlace& p) { return same_stage_and_replica(p) && p.dp_shard == own.dp_shard; });
      expect_members(mesh.tokens, same_stage);
      expect_members(mesh.shard_of_cut,
                     [&](const MeshPlace& p) { return same_stage_and_replica(p) && p.tp == own.tp; });
      expect_members(mesh.shard_of_whole, same_stage_and_replica);
      expect_members(mesh.ep,
                     [&](const MeshPlace& p) { return same_stage_and_replica(p) && p.ep_shard == own.ep_shard; });
      expect_members(mesh.shard_of_experts,
                     [&](const MeshPlace& p) { return same_stage_and_replica(p) && p.ep == own.ep; });
      expect_members(mesh.model, same_replica);
      if (degrees.num_ep_domains() > 1) {
        const std::int64_t size = degrees.ep_domain;
        expect_members(mesh.ep_within, [&](const MeshPlace& p) {
          return same_stage_and_replica(p) && p.ep_shard == own.ep_shard && p.ep / size == own.ep / size;
        });
        expect_members(mesh.ep_across, [&](const MeshPlace& p) {
          return same_stage_and_replica(p) && p.ep_shard == own.ep_shard && p.ep % size == own.ep % size;
        });
        EXPECT_EQ(mesh.ep_across.rank(), own.ep / size);
      } else {
        EXPECT_EQ(mesh.ep_within.size() * mesh.ep_across.size(), 1);
      }
      EXPECT_EQ(mesh.ep.rank(), own.ep);
    });
  }
}

}  // namespace
}  // namespace tessera
