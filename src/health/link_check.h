// Checks that the links between the ranks of a cluster work, and as fast as the others. It runs collectives of all
// ranks and then every pair of ranks by itself, which identifies a slow link or node. The nodes must be idle. It takes
// seconds for a few ranks, and a minute for hundreds.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "comm/process_group.h"
#include "health/probe.h"
#include "ops/runtime/runtime.h"

namespace tessera {

struct LinkCheckOptions {
  std::int64_t num_bytes = std::int64_t{64} << 20;  // of a message
  int repeats = 5;                                  // of each operation; the median is used
  /// The expected rates in GB/s. With 0, a pair's rate is compared with those of the other pairs, and collectives are
  /// not compared.
  double expected_pair_inside = 0.0, expected_pair_between = 0.0;  // within a node; between nodes
  double expected_all_reduce = 0.0, expected_all_to_all = 0.0;
  double slow_share = 0.8;  // a link is slow below this share of the expected rate
};

/// Holds the nodes of the ranks.
struct RankPlaces {
  std::vector<int> nodes;          // by rank: the first rank on its node
  std::vector<std::string> hosts;  // by rank: the name of its node

  /// Returns "rank 1 on n2".
  std::string describe(std::size_t rank) const;
};

/// Holds rates in GB/s between every two ranks, in both directions at once. Rank a measures rates[a][b]. 0 means that
/// it was not measured.
using PairRates = std::vector<std::vector<double>>;

struct LinkReport {
  double all_reduce_gb_per_s = 0.0;  // bus bandwidth: 2 (n - 1) / n of the message's bytes per time
  double all_to_all_gb_per_s = 0.0;  // bytes that a rank sends to others, (n - 1) / n of the message's, per time
  PairRates pairs;
  /// The findings, which are all hard evidence.
  /// - `linkWrong`: the numbers that arrive are not those that were sent. The part is "rank 1 on n2 to rank 2 on n3".
  /// - `linkSlow`: a pair, "rank 1 on n2 - rank 2 on n3", is slow, or a rank, if most of its pairs are slow.
  /// - `allReduceSlow`, `allToAllSlow`: a collective of all ranks is slow.
  std::vector<Finding> findings;
};

/// Measures the links between all ranks of `world`. There must be at least two, which must call it together. All get
/// the same report. `runtime` is this rank's GPU, which the world uses. It is null on CPUs. Throws RankFailure if a
/// rank does not take part.
LinkReport check_links(ProcessGroup& world, const RankPlaces& places, cuda::Runtime* runtime,
                       const LinkCheckOptions& options);

/// Returns findings about the slow pairs and ranks.
std::vector<Finding> judge_pairs(const PairRates& pairs, const RankPlaces& places, const LinkCheckOptions& options);

/// Returns the partner of `rank` in a round, or nullopt if it has none. In rounds 0 to num_rounds() - 1, every two
/// ranks are partners once.
std::optional<int> partner_in_round(int rank, int round, int num_ranks);
constexpr int num_rounds(int num_ranks) { return num_ranks % 2 == 0 ? num_ranks - 1 : num_ranks; }

}  // namespace tessera
