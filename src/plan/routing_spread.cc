#include "plan/routing_spread.h"

#include <algorithm>
#include <numeric>
#include <random>

#include "base/error.h"

namespace tessera {
namespace {

constexpr std::int64_t kTokens = 4096;

/// Draws different numbers below `end`.
class Urn {
 public:
  explicit Urn(std::int64_t end) : numbers_(static_cast<std::size_t>(end)) {
    std::iota(numbers_.begin(), numbers_.end(), std::int64_t{0});
  }

  std::vector<std::int64_t> draw(std::int64_t count, std::mt19937_64& random) {
    std::vector<std::size_t> swapped;
    for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) {
      swapped.push_back(i + static_cast<std::size_t>(random() % (numbers_.size() - i)));
      std::swap(numbers_[i], numbers_[swapped.back()]);
    }
    const std::vector<std::int64_t> drawn(numbers_.begin(), numbers_.begin() + count);
    for (std::size_t i = swapped.size(); i-- > 0;) std::swap(numbers_[i], numbers_[swapped[i]]);
    return drawn;
  }

 private:
  std::vector<std::int64_t> numbers_;  // in order, but while it draws
};

/// Chooses experts for one token after the other.
class Chooser {
 public:
  explicit Chooser(const RoutingQuestion& question)
      : question_(question),
        groups_(question.num_groups),
        experts_(question.kind == RoutingKind::kGroups
                     ? question.num_limited_groups * (question.num_experts / question.num_groups)
                     : question.num_experts) {}

  std::vector<std::int64_t> choose() {
    const std::int64_t experts = question_.num_experts, top_k = question_.top_k, token = num_tokens_++;
    if (question_.kind == RoutingKind::kForced) {
      std::vector<std::int64_t> choices;
      for (std::int64_t k = 0; k < top_k; ++k) choices.push_back((token * top_k + k) % experts);
      return choices;
    }
    if (question_.kind == RoutingKind::kUniform) return experts_.draw(top_k, random_);
    const std::vector<std::int64_t> groups = groups_.draw(question_.num_limited_groups, random_);
    std::vector<std::int64_t> choices = experts_.draw(top_k, random_);
    const std::int64_t size = experts / question_.num_groups;
    for (std::int64_t& choice : choices)
      choice = groups[static_cast<std::size_t>(choice / size)] * size + choice % size;
    return choices;
  }

 private:
  const RoutingQuestion& question_;
  Urn groups_, experts_;  // of the groups that were drawn, the experts
  std::mt19937_64 random_{0};
  std::int64_t num_tokens_ = 0;
};

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
  Chooser chooser(question);
  RoutingSpread sum;
  for (std::int64_t token = 0; token < kTokens; ++token) {
    std::vector<std::int64_t> ranks, domains;
    bool is_at_home = false;
    for (const std::int64_t expert : chooser.choose()) {
      const std::int64_t rank = expert / experts_per_rank;
      const std::int64_t domain = question.domain_of_rank[static_cast<std::size_t>(rank)];
      if (rank == 0) {
        is_at_home = true;
        continue;
      }
      sum.choices_away += 1.0;
      sum.choices_elsewhere += domain == home ? 0.0 : 1.0;
      if (std::ranges::count(ranks, rank) > 0) continue;
      ranks.push_back(rank);
      (domain == home ? sum.ranks_in_domain : sum.ranks_elsewhere) += 1.0;
      if (domain != home && std::ranges::count(domains, domain) == 0) domains.push_back(domain);
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
