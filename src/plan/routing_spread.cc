#include "plan/routing_spread.h"

#include <algorithm>
#include <numeric>
#include <random>
#include <set>

#include "base/error.h"

namespace tessera {
namespace {

constexpr std::int64_t kTokens = 4096;

/// Moves `count` different random numbers of `all` to its front.
void draw(std::vector<std::int64_t>& all, std::int64_t count, std::mt19937_64& random) {
  for (std::int64_t i = 0; i < count; ++i) {
    const auto rest = static_cast<std::uint64_t>(all.size()) - static_cast<std::uint64_t>(i);
    std::swap(all[static_cast<std::size_t>(i)],
              all[static_cast<std::size_t>(i) + static_cast<std::size_t>(random() % rest)]);
  }
}

std::vector<std::int64_t> numbers_below(std::int64_t end) {
  std::vector<std::int64_t> numbers(static_cast<std::size_t>(end));
  std::iota(numbers.begin(), numbers.end(), std::int64_t{0});
  return numbers;
}

std::vector<std::int64_t> choices_of(const RoutingQuestion& question, std::int64_t token, std::mt19937_64& random) {
  const std::int64_t experts = question.num_experts, top_k = question.top_k;
  std::vector<std::int64_t> choices;
  if (question.kind == RoutingKind::kForced) {
    for (std::int64_t k = 0; k < top_k; ++k) choices.push_back((token * top_k + k) % experts);
    return choices;
  }
  std::vector<std::int64_t> candidates = numbers_below(experts);
  if (question.kind == RoutingKind::kGroups) {
    std::vector<std::int64_t> groups = numbers_below(question.num_groups);
    draw(groups, question.num_limited_groups, random);
    candidates.clear();
    const std::int64_t size = experts / question.num_groups;
    for (std::int64_t g = 0; g < question.num_limited_groups; ++g) {
      for (std::int64_t i = 0; i < size; ++i) candidates.push_back(groups[static_cast<std::size_t>(g)] * size + i);
    }
  }
  draw(candidates, top_k, random);
  candidates.resize(static_cast<std::size_t>(top_k));
  return candidates;
}

}  // namespace

RoutingKind routing_kind(const std::string& name) {
  if (name == "forced") return RoutingKind::kForced;
  if (name == "uniform") return RoutingKind::kUniform;
  if (name == "groups") return RoutingKind::kGroups;
  fail("no routing '{}': forced, uniform and groups are known", name);
}

RoutingSpread spread_of(const RoutingQuestion& question) {
  const auto num_ranks = static_cast<std::int64_t>(question.domain_of_rank.size());
  TESSERA_CHECK(num_ranks > 0 && question.num_experts % num_ranks == 0 && question.top_k <= question.num_experts,
                "{} experts, top {}, {} ranks", question.num_experts, question.top_k, num_ranks);
  const std::int64_t experts_per_rank = question.num_experts / num_ranks;
  const std::int64_t home = question.domain_of_rank.front();
  std::mt19937_64 random(0);
  RoutingSpread sum;
  for (std::int64_t token = 0; token < kTokens; ++token) {
    std::set<std::int64_t> ranks, domains;
    bool is_at_home = false;
    for (const std::int64_t expert : choices_of(question, token, random)) {
      const std::int64_t rank = expert / experts_per_rank;
      const std::int64_t domain = question.domain_of_rank[static_cast<std::size_t>(rank)];
      if (rank == 0) {
        is_at_home = true;
        continue;
      }
      sum.choices_away += 1.0;
      sum.choices_elsewhere += domain == home ? 0.0 : 1.0;
      if (!ranks.insert(rank).second) continue;
      (domain == home ? sum.ranks_in_domain : sum.ranks_elsewhere) += 1.0;
      if (domain != home) domains.insert(domain);
    }
    sum.own_rank += is_at_home ? 1.0 : 0.0;
    sum.other_domains += static_cast<double>(domains.size());
  }
  for (double* number : {&sum.own_rank, &sum.ranks_in_domain, &sum.other_domains, &sum.ranks_elsewhere,
                         &sum.choices_away, &sum.choices_elsewhere}) {
    *number /= static_cast<double>(kTokens);
  }
  return sum;
}

}  // namespace tessera
