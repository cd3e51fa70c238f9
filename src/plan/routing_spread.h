// How many ranks a token's row goes to, which depends on how the router chooses experts.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera {

/// Says how a plan takes the router to choose.
enum class RoutingKind {
  kForced,   // debug.moe_force_load_balance: the k-th choice of token t is expert (t·K + k) mod E
  kUniform,  // K different experts, all equally likely
  kGroups    // K different experts of n_limited_groups different groups
};
/// Returns the kind of "forced", "uniform" or "groups". Throws Error, which names these, for another name.
RoutingKind routing_kind(const std::string& name);

struct RoutingQuestion {
  RoutingKind kind = RoutingKind::kUniform;
  std::int64_t num_experts = 0, top_k = 0;
  std::int64_t num_groups = 1, num_limited_groups = 1;  // of kGroups
  /// The domain of each rank of the expert-parallel group. Ranks have equally many experts, in order.
  std::vector<std::int64_t> domain_of_rank;
};

/// Holds means over tokens, whose home is the group's rank 0.
struct RoutingSpread {
  double own_rank = 0.0;           // 1 for a token that has an expert on its home
  double ranks_in_domain = 0.0;    // other ranks of the home's domain that have an expert of the token
  double other_domains = 0.0;      // other domains that have one
  double ranks_elsewhere = 0.0;    // ranks in other domains that have one
  double choices_away = 0.0;       // choices whose expert is on another rank
  double choices_elsewhere = 0.0;  // choices whose expert is in another domain

  double other_ranks() const { return ranks_in_domain + ranks_elsewhere; }
};

/// Returns the means over some thousand simulated tokens. The same question always has the same answer.
RoutingSpread spread_of(const RoutingQuestion& question);

}  // namespace tessera
