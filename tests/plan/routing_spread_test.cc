// Compares the counted spread of tokens with formulas.
#include "plan/routing_spread.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "tests/expect_error.h"

namespace tessera {
namespace {

std::vector<std::int64_t> domains(std::int64_t num_ranks, std::int64_t ranks_per_domain) {
  std::vector<std::int64_t> result;
  for (std::int64_t rank = 0; rank < num_ranks; ++rank) result.push_back(rank / ranks_per_domain);
  return result;
}

/// Returns the probability that none of K different experts out of E is among e given ones.
double none_of(double experts, double given, double top_k) {
  double probability = 1.0;
  for (double k = 0; k < top_k; ++k) probability *= (experts - given - k) / (experts - k);
  return probability;
}

TEST(RoutingSpread, UniformChoicesFollowTheFormula) {
  const RoutingSpread spread =
      spread_of({.kind = RoutingKind::kUniform, .num_experts = 256, .top_k = 8, .domain_of_rank = domains(16, 8)});
  const double of_rank = 1.0 - none_of(256, 16, 8), of_domain = 1.0 - none_of(256, 128, 8);
  EXPECT_NEAR(spread.ranks_in_domain, 7.0 * of_rank, 0.1);
  EXPECT_NEAR(spread.ranks_elsewhere, 8.0 * of_rank, 0.1);
  EXPECT_NEAR(spread.other_domains, of_domain, 0.01);
  EXPECT_NEAR(spread.choices_away, 8.0 * 15 / 16, 0.05);
  EXPECT_NEAR(spread.choices_elsewhere, 4.0, 0.1);
}

TEST(RoutingSpread, ForcedChoicesAreNeighbours) {
  // Two ranks with 32 experts each: the choices of a token are 8 in a row, and start at a multiple of 8.
  const RoutingSpread spread =
      spread_of({.kind = RoutingKind::kForced, .num_experts = 64, .top_k = 8, .domain_of_rank = domains(2, 2)});
  EXPECT_EQ(spread.ranks_in_domain, 0.5);
  EXPECT_EQ(spread.choices_away, 4.0);
  EXPECT_EQ(spread.other_domains, 0.0);
}

TEST(RoutingSpread, GroupsLimitTheDomains) {
  // A group per domain, of which a token has two.
  const RoutingSpread spread = spread_of({.kind = RoutingKind::kGroups,
                                          .num_experts = 64,
                                          .top_k = 8,
                                          .num_groups = 8,
                                          .num_limited_groups = 2,
                                          .domain_of_rank = domains(32, 4)});
  EXPECT_LE(spread.other_domains, 2.0);
  EXPECT_NEAR(spread.other_domains, 2.0 * 7 / 8, 0.05);
  const RoutingSpread uniform =
      spread_of({.kind = RoutingKind::kUniform, .num_experts = 64, .top_k = 8, .domain_of_rank = domains(32, 4)});
  EXPECT_LT(spread.other_domains, uniform.other_domains);
}

TEST(RoutingSpread, OneRankSendsNothing) {
  const RoutingSpread spread =
      spread_of({.kind = RoutingKind::kUniform, .num_experts = 8, .top_k = 2, .domain_of_rank = domains(1, 8)});
  EXPECT_EQ(spread.other_ranks() + spread.choices_away + spread.other_domains, 0.0);
}

TEST(RoutingSpread, UnknownKindsAreNamed) {
  EXPECT_EQ(routing_kind("groups"), RoutingKind::kGroups);
  expect_error([] { static_cast<void>(routing_kind("random")); }, {"random", "forced", "uniform", "groups"});
}

}  // namespace
}  // namespace tessera
