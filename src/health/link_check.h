// Whether the links between the ranks of a cluster work, and as fast as the others: collectives of all ranks, then
// every pair of ranks by itself, which names a slow link or node. For idle nodes; seconds for a few ranks, a minute for
// hundreds.
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
  int repeats = 5;                                  // of each operation; the median counts
  /// What is expected, in GB/s. 0: a pair's rate is compared with the other pairs', collectives' with nothing.
  double expected_pair_inside = 0.0, expected_pair_between = 0.0;  // of a node, of two nodes
  double expected_all_reduce = 0.0, expected_all_to_all = 0.0;
  double slow_share = 0.8;  // of what is expected; below it a link is slow
};

/// Where the ranks are.
struct RankPlaces {
  std::vector<int> nodes;          // of every rank, the first rank on its node
  std::vector<std::string> hosts;  // of every rank, the name of its node
};

/// GB/s between every two ranks, each way at the same time: rates[a][b] as rank a has measured it. 0: not measured.
using PairRates = std::vector<std::vector<double>>;

struct LinkReport {
  double all_reduce_gb_per_s = 0.0;  // bus bandwidth: 2 (n - 1) / n of the message's bytes per time
  double all_to_all_gb_per_s = 0.0;  // what a rank sends to others, (n - 1) / n of the bytes, per time
  PairRates pairs;
  /// `linkWrong`: what arrived is not what was sent. `linkSlow`: of a pair, "n1 - n2", or of a rank, if most of its
  /// pairs are slow. `allReduceSlow`, `allToAllSlow`: of all ranks. All are hard evidence.
  std::vector<Finding> findings;
};

/// Measures the links between all ranks of `world`, at least two, which must call it together. All get the same report.
/// `runtime`: this rank's GPU, which the world uses; null on CPUs. Throws RankFailure if a rank does not come.
LinkReport check_links(ProcessGroup& world, const RankPlaces& places, cuda::Runtime* runtime,
                       const LinkCheckOptions& options);

/// The slow pairs and ranks.
std::vector<Finding> judge_pairs(const PairRates& pairs, const RankPlaces& places, const LinkCheckOptions& options);

/// With whom `rank` of `num_ranks` is a pair in a round: in rounds 0 to num_rounds() - 1 every two ranks meet once.
/// None in a round in which it has nobody.
std::optional<int> partner_in_round(int rank, int round, int num_ranks);
constexpr int num_rounds(int num_ranks) { return num_ranks % 2 == 0 ? num_ranks - 1 : num_ranks; }

}  // namespace tessera
