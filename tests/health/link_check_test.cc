#include "health/link_check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <deque>
#include <set>

#include "comm/transport/forwarding_transport.h"
#include "tests/comm/ranks.h"
#include "tests/health/findings.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(LinkCheck, EveryTwoRanksMeetOnce) {
  for (int num_ranks = 2; num_ranks <= 9; ++num_ranks) {
    std::set<std::pair<int, int>> met;
    for (int round = 0; round < num_rounds(num_ranks); ++round) {
      for (int rank = 0; rank < num_ranks; ++rank) {
        const std::optional<int> partner = partner_in_round(rank, round, num_ranks);
        if (!partner) continue;
        EXPECT_NE(*partner, rank);
        EXPECT_EQ(partner_in_round(*partner, round, num_ranks), rank) << num_ranks << " ranks, round " << round;
        EXPECT_TRUE(met.emplace(rank, *partner).second) << rank << " meets " << *partner << " twice";
      }
    }
    EXPECT_EQ(static_cast<int>(met.size()), num_ranks * (num_ranks - 1)) << num_ranks;
  }
}

TEST(LinkCheck, RatesOfThreads) {
  for (const int num_ranks : {2, 3, 4}) {
    comm_test::with_ranks(num_ranks, [&](ProcessGroup& world) {
      RankPlaces places{.nodes = std::vector<int>(static_cast<std::size_t>(num_ranks), 0),
                        .hosts = std::vector<std::string>(static_cast<std::size_t>(num_ranks), "n1")};
      LinkCheckOptions options{.num_bytes = 1 << 16, .repeats = 2, .slow_share = 0.0};
      const LinkReport report = check_links(world, places, nullptr, options);
      EXPECT_THAT(names_of(report.findings), IsEmpty());
      EXPECT_GT(report.all_reduce_gb_per_s, 0.0);
      EXPECT_GT(report.all_to_all_gb_per_s, 0.0);
      for (std::size_t a = 0; a < report.pairs.size(); ++a) {
        for (std::size_t b = 0; b < report.pairs.size(); ++b) EXPECT_EQ(report.pairs[a][b] > 0.0, a != b);
      }
      options.slow_share = 0.8;
      options.expected_all_reduce = options.expected_all_to_all = options.expected_pair_inside = 1e9;
      EXPECT_THAT(names_of(check_links(world, places, nullptr, options).findings),
                  ::testing::IsSupersetOf({std::string("allReduceSlow"), std::string("allToAllSlow")}));
    });
  }
}

/// Nodes with the same number of ranks each. All pairs within nodes have one rate, and all pairs between nodes another.
struct Cluster {
  explicit Cluster(int num_nodes, int ranks_per_node, double inside, double between) {
    for (int rank = 0; rank < num_nodes * ranks_per_node; ++rank) {
      places.nodes.push_back(rank / ranks_per_node * ranks_per_node);
      places.hosts.push_back(fmt::format("n{}", rank / ranks_per_node + 1));
    }
    pairs.assign(places.nodes.size(), std::vector<double>(places.nodes.size(), 0.0));
    for (std::size_t a = 0; a < pairs.size(); ++a) {
      for (std::size_t b = 0; b < pairs.size(); ++b) {
        if (a != b) pairs[a][b] = places.nodes[a] == places.nodes[b] ? inside : between;
      }
    }
  }
  std::vector<std::string> judge(const LinkCheckOptions& options = {}) const {
    return names_of(judge_pairs(pairs, places, options));
  }

  RankPlaces places;
  PairRates pairs;
};

TEST(LinkCheck, OneSlowLinkIsNamed) {
  Cluster cluster(3, 2, 300.0, 40.0);
  EXPECT_THAT(cluster.judge(), IsEmpty());
  cluster.pairs[5][0] = 20.0;  // in one direction
  EXPECT_THAT(cluster.judge(), ElementsAre("linkSlow rank 0 on n1 - rank 5 on n3"));
  cluster.pairs[2][3] = 100.0;  // one of three pairs within nodes
  EXPECT_THAT(cluster.judge(),
              ElementsAre("linkSlow rank 0 on n1 - rank 5 on n3", "linkSlow rank 2 on n2 - rank 3 on n2"));
}

TEST(LinkCheck, ARankWhoseLinksAreSlowIsNamed) {
  for (const int num_nodes : {3, 4, 9}) {
    Cluster cluster(num_nodes, 1, 0.0, 40.0);
    for (std::size_t other = 0; other < cluster.pairs.size(); ++other) {
      if (other != 1) cluster.pairs[1][other] = cluster.pairs[other][1] = 10.0;
    }
    EXPECT_THAT(cluster.judge(), ElementsAre("linkSlow rank 1 on n2")) << num_nodes;
  }
}

TEST(LinkCheck, TwoRanksAreComparedWithWhatIsExpectedOnly) {
  const Cluster cluster(2, 1, 0.0, 1.0);
  EXPECT_THAT(cluster.judge(), IsEmpty());
  EXPECT_THAT(cluster.judge({.expected_pair_between = 40.0}), ElementsAre("linkSlow rank 0 on n1 - rank 1 on n2"));
}

/// Changes a number in every message of rank 0 that has this many bytes or more.
class FlipsBits : public ForwardingTransport {
 public:
  FlipsBits(std::unique_ptr<Transport> transport, std::size_t least)
      : ForwardingTransport(std::move(transport)), least_(least) {}
  std::unique_ptr<Request> send(const std::byte* data, std::size_t num_bytes, int to, int tag) override {
    if (rank() != 0 || num_bytes < least_) return transport().send(data, num_bytes, to, tag);
    copies_.emplace_back(data, data + num_bytes);
    copies_.back()[2] ^= std::byte{0x40};
    return transport().send(copies_.back().data(), num_bytes, to, tag);
  }
  std::unique_ptr<Transport> split(int color, int order, std::string_view axis) override {
    return std::make_unique<FlipsBits>(transport().split(color, order, axis), least_);
  }

 private:
  std::size_t least_;
  std::deque<std::vector<std::byte>> copies_;  // which stay until the messages have arrived
};

TEST(LinkCheck, WrongNumbersAreFound) {
  const auto flip = [](std::unique_ptr<Transport> transport) -> std::unique_ptr<Transport> {
    return std::make_unique<FlipsBits>(std::move(transport), 8192);
  };
  comm_test::with_ranks(2,
                        [&](ProcessGroup& world) {
                          const RankPlaces places{.nodes = {0, 0}, .hosts = {"n1", "n2"}};
                          const LinkReport report = check_links(
                              world, places, nullptr, {.num_bytes = 1 << 20, .repeats = 1, .slow_share = 0.0});
                          EXPECT_THAT(names_of(report.findings),
                                      ElementsAre("linkWrong", "linkWrong", "linkWrong rank 0 on n1 to rank 1 on n2"));
                        },
                        {.wrap = flip});
}

}  // namespace
}  // namespace tessera
