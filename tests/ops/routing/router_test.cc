#include "ops/routing/router.h"

#include <numeric>
#include <set>

#include "tests/ops/harness.h"

namespace tessera {
namespace {

Doubles scores_of(const RouterOptions& options, const Doubles& logits, std::size_t experts) {
  Doubles scores(logits.size());
  for (std::size_t row = 0; row < logits.size(); row += experts) {
    double sum = 0.0;
    for (std::size_t e = 0; e < experts; ++e) sum += std::exp(logits[row + e]);
    for (std::size_t e = 0; e < experts; ++e) {
      scores[row + e] = options.score_function == ScoreFunction::kSigmoid ? 1.0 / (1.0 + std::exp(-logits[row + e]))
                                                                          : std::exp(logits[row + e]) / sum;
    }
  }
  return scores;
}

/// Returns the indices of the k highest values, in falling order. Ties go to the lower index.
std::vector<std::size_t> top(const Doubles& values, std::size_t k) {
  std::vector<std::size_t> order(values.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return values[a] > values[b]; });
  order.resize(k);
  return order;
}

std::vector<std::size_t> choose(const RouterOptions& options, Doubles biased) {
  if (options.num_groups > 0) {
    const std::size_t groups = static_cast<std::size_t>(options.num_groups), size = biased.size() / groups;
    Doubles group_scores;
    for (std::size_t g = 0; g < groups; ++g) {
      Doubles members(biased.begin() + static_cast<std::ptrdiff_t>(g * size),
                      biased.begin() + static_cast<std::ptrdiff_t>((g + 1) * size));
      std::sort(members.rbegin(), members.rend());
      group_scores.push_back(size > 1 ? members[0] + members[1] : members[0]);
    }
    const auto kept = top(group_scores, static_cast<std::size_t>(options.num_limited_groups));
    for (std::size_t e = 0; e < biased.size(); ++e) {
      if (std::find(kept.begin(), kept.end(), e / size) == kept.end()) biased[e] = -HUGE_VAL;
    }
  }
  return top(biased, static_cast<std::size_t>(options.top_k));
}

/// Returns the weights of the chosen experts, from scores.
Doubles weights_of(const RouterOptions& options, const Doubles& scores, const Doubles& ids, std::size_t experts) {
  const auto k = static_cast<std::size_t>(options.top_k);
  Doubles weights;
  for (std::size_t t = 0; t < ids.size() / k; ++t) {
    double sum = 1e-20;
    for (std::size_t i = 0; i < k; ++i) sum += scores[t * experts + static_cast<std::size_t>(ids[t * k + i])];
    for (std::size_t i = 0; i < k; ++i) {
      const double score = scores[t * experts + static_cast<std::size_t>(ids[t * k + i])];
      weights.push_back(static_cast<double>(options.route_scale) * (options.route_norm ? score / sum : score));
    }
  }
  return weights;
}

/// Returns the balance loss of DeepSeek-V3's eq. 17-20, summed over sequences, with its coefficient. f is computed from
/// `frozen` scores.
double balance_of(const RouterOptions& options, const Doubles& scores, const Doubles& frozen, std::size_t experts) {
  const auto length = static_cast<std::size_t>(options.seq_len), k = static_cast<std::size_t>(options.top_k);
  double loss = 0.0;
  for (std::size_t b = 0; b < scores.size() / experts / length; ++b) {
    Doubles f(experts, 0.0), p(experts, 0.0);
    for (std::size_t t = b * length; t < (b + 1) * length; ++t) {
      const auto row = static_cast<std::ptrdiff_t>(t * experts);
      const Doubles values(frozen.begin() + row, frozen.begin() + row + static_cast<std::ptrdiff_t>(experts));
      for (const std::size_t e : top(values, k)) f[e] += static_cast<double>(experts) / static_cast<double>(k * length);
      double sum = 0.0;
      for (std::size_t e = 0; e < experts; ++e) sum += scores[t * experts + e];
      for (std::size_t e = 0; e < experts; ++e) p[e] += scores[t * experts + e] / sum / static_cast<double>(length);
    }
    loss += static_cast<double>(options.balance_coefficient) * dot(f, p);
  }
  return loss;
}

class Router : public OperatorTest {
 protected:
  RouterOutputs outputs(std::int64_t tokens, std::int64_t experts, const RouterOptions& options) {
    return {.scores_TE = random({tokens, experts}),
            .expert_ids_TK = ints(std::vector<std::int32_t>(static_cast<std::size_t>(tokens * options.top_k), -1),
                                  {tokens, options.top_k}),
            .weights_TK = random({tokens, options.top_k}),
            .counts_E = ints(std::vector<std::int32_t>(static_cast<std::size_t>(experts), -1)),
            .balance_f_BE = random({tokens / options.seq_len, experts})};
  }

  /// The functions below are for a rank that has all tokens of the sequences. alone() returns its options. The others
  /// return the balance loss, or 0 without one.
  RouterOptions alone(RouterOptions options) {
    options.tokens_per_seq = options.seq_len;
    return options;
  }
  double balance_of_sums(const RouterOptions& options, const Tensor& sums, const Tensor& f) {
    const Tensor loss_1 = arena_.allocate({1}, DType::kFloat64);
    *loss_1.data<double>() = 0.25;  // balance_loss adds to this number
    balance_loss(context(), options, sums, f, loss_1);
    return *loss_1.data<double>() - 0.25;
  }
  double route(const RouterOptions& options, const Tensor& logits, const Tensor& bias, const RouterOutputs& out) {
    router_forward(context(), options, logits, bias, out);
    if (options.balance_coefficient == 0.0f) return 0.0;
    const Tensor sums = random({out.balance_f_BE.dim(0), 2, logits.dim(1)});
    balance_sums(context(), options, out.scores_TE, sums);
    return balance_of_sums(options, sums, out.balance_f_BE);
  }

  void check(const RouterOptions& given, std::int64_t tokens, std::int64_t experts_count) {
    const RouterOptions options = alone(given);
    const auto experts = static_cast<std::size_t>(experts_count);
    const Tensor logits = random({tokens, experts_count}, DType::kFloat32, 3.0);
    const Tensor bias = random({experts_count}, DType::kFloat32, 0.1);
    const RouterOutputs out = outputs(tokens, experts_count, options);
    const double balance = route(options, logits, bias, out);

    const Doubles scores = scores_of(options, doubles(logits), experts);
    EXPECT_LE(relative_error(out.scores_TE, scores), kForwardBound);
    Doubles ids, counts(experts, 0.0);
    for (std::size_t t = 0; t < static_cast<std::size_t>(tokens); ++t) {
      Doubles biased;
      for (std::size_t e = 0; e < experts; ++e) biased.push_back(scores[t * experts + e] + doubles(bias)[e]);
      std::vector<std::size_t> chosen = choose(options, biased);
      for (std::size_t k = 0; k < chosen.size(); ++k) {
        if (options.force_load_balance) chosen[k] = (t * chosen.size() + k) % experts;
        ids.push_back(static_cast<double>(chosen[k]));
        counts[chosen[k]] += 1.0;
      }
    }
    EXPECT_EQ(doubles(out.expert_ids_TK), ids);
    EXPECT_EQ(doubles(out.counts_E), counts);
    EXPECT_LE(relative_error(out.weights_TK, weights_of(options, scores, ids, experts)), kForwardBound);
    EXPECT_NEAR(balance, balance_of(options, scores, scores, experts), kForwardBound * std::max(balance, 1e-3));

    const Tensor d_weights = random({tokens, options.top_k}), d_logits = random({tokens, experts_count});
    constexpr double kBalanceScale = 0.5;
    router_backward(context(), options, out, d_weights, static_cast<float>(kBalanceScale), d_logits);
    const Doubles expected = central_differences(
        [&](const Doubles& v) {
          const Doubles s = scores_of(options, v, experts);
          return dot(weights_of(options, s, ids, experts), doubles(d_weights)) +
                 kBalanceScale * balance_of(options, s, scores, experts);
        },
        doubles(logits));
    EXPECT_LE(relative_error(d_logits, expected), kBackwardBound);
  }
};

TEST_F(Router, AllOptions) {
  for (const ScoreFunction function : {ScoreFunction::kSoftmax, ScoreFunction::kSigmoid}) {
    for (const bool norm : {false, true}) {
      for (const std::int64_t groups : {0, 4}) {
        for (const float balance : {0.0f, 0.3f}) {
          for (const bool force : {false, true}) {
            check({.score_function = function,
                   .route_norm = norm,
                   .route_scale = 2.5f,
                   .top_k = 3,
                   .num_groups = groups,
                   .num_limited_groups = 2,
                   .force_load_balance = force,
                   .balance_coefficient = balance,
                   .seq_len = 6},
                  12, 8);
          }
        }
      }
    }
  }
}

TEST_F(Router, Edges) {
  check({.top_k = 1, .seq_len = 1}, 1, 1);                                            // one of everything
  check({.route_norm = true, .top_k = 7, .seq_len = 5}, 5, 7);                        // all experts chosen
  check({.top_k = 2, .num_groups = 6, .num_limited_groups = 2, .seq_len = 1}, 3, 6);  // groups of one
  // More tokens than a task has.
  check({.score_function = ScoreFunction::kSigmoid, .top_k = 4, .seq_len = 150}, 150, 33);
}

TEST_F(Router, TiesGoToTheLowerIndex) {
  const RouterOptions options{.top_k = 2, .num_groups = 3, .num_limited_groups = 2, .seq_len = 1};
  const Tensor logits = random({1, 6}), bias = random({6});
  std::fill_n(logits.data<float>(), 6, 0.0f);
  std::fill_n(bias.data<float>(), 6, 0.0f);
  const RouterOutputs out = outputs(1, 6, options);
  router_forward(context(), options, logits, bias, out);
  EXPECT_EQ(doubles(out.expert_ids_TK), (Doubles{0, 1}));
}

// Whatever a token's logits are, its experts differ.
TEST_F(Router, ATokensExpertsDifferWhateverItsLogitsAre) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const ScoreFunction function : {ScoreFunction::kSoftmax, ScoreFunction::kSigmoid}) {
    for (const std::int64_t num_groups : {0, 4}) {
      const RouterOptions options{
          .score_function = function, .top_k = 3, .num_groups = num_groups, .num_limited_groups = 2};
      const Tensor logits = random({4, 8});
      std::fill_n(logits.data<float>(), 8, NAN);
      std::fill_n(logits.data<float>() + 8, 8, kInfinity);
      std::fill_n(logits.data<float>() + 16, 8, -kInfinity);
      logits.data<float>()[26] = NAN;
      const RouterOutputs out = outputs(4, 8, options);
      router_forward(context(), options, logits, random({8}), out);
      for (std::int64_t t = 0; t < 4; ++t) {
        const auto* ids = out.expert_ids_TK.data<std::int32_t>() + t * 3;
        EXPECT_EQ(std::set<std::int32_t>(ids, ids + 3).size(), 3u) << t;
      }
    }
  }
}

// Biases make ties of scores, and groups of equal scores. Of each tie the lower index is chosen.
TEST_F(Router, TiesOfBiasedScoresAndOfGroups) {
  const Tensor logits = random({1, 8}), bias = random({8});
  std::fill_n(logits.data<float>(), 8, 0.0f);  // all scores are 1/8
  const std::vector<float> biases = {0.0f, 0.5f, 0.0f, 0.5f, 0.5f, 0.0f, 0.25f, 0.25f};
  std::copy(biases.begin(), biases.end(), bias.data<float>());
  const auto chosen = [&](const RouterOptions& options) {
    const RouterOutputs out = outputs(1, 8, options);
    router_forward(context(), options, logits, bias, out);
    EXPECT_LE(relative_error(out.weights_TK, Doubles(static_cast<std::size_t>(options.top_k), 0.125)), 1e-6);
    return doubles(out.expert_ids_TK);
  };
  EXPECT_EQ(chosen({.top_k = 5, .seq_len = 1}), (Doubles{1, 3, 4, 6, 7}));
  // All groups of two score 0.5, so the first two stay.
  EXPECT_EQ(chosen({.top_k = 3, .num_groups = 4, .num_limited_groups = 2, .seq_len = 1}), (Doubles{1, 3, 0}));
}

// A bias selects experts but does not weigh them. The balance loss ignores it: eq. 18 counts the top-k of unbiased
// scores.
TEST_F(Router, BiasSelectsOnly) {
  const RouterOptions options =
      alone({.score_function = ScoreFunction::kSigmoid, .top_k = 1, .balance_coefficient = 1.0f, .seq_len = 2});
  const Tensor logits = random({2, 3}), bias = random({3});
  const std::vector<float> values = {2.0f, 0.0f, 1.0f, 1.5f, -1.0f, 0.5f}, biases = {0.0f, 5.0f, 0.0f};
  std::copy(values.begin(), values.end(), logits.data<float>());
  std::copy(biases.begin(), biases.end(), bias.data<float>());
  const RouterOutputs out = outputs(2, 3, options);
  route(options, logits, bias, out);
  EXPECT_EQ(doubles(out.expert_ids_TK), (Doubles{1, 1}));
  EXPECT_LE(relative_error(out.weights_TK, {0.5, 1.0 / (1.0 + std::exp(1.0))}), kForwardBound);
  EXPECT_LE(relative_error(out.balance_f_BE, {3.0, 0.0, 0.0}), kForwardBound);
}

// Ranks have parts of two sequences, and one rank has a part of both. The ranks' sums add up, and their gradients are
// the whole's.
TEST_F(Router, SequencesCutAmongRanks) {
  constexpr std::int64_t kSeqs = 2, kLength = 6, kExperts = 5, kTokens = 4;  // tokens of a rank
  RouterOptions options = alone({.top_k = 2, .balance_coefficient = 0.3f, .seq_len = kLength});
  const Tensor logits = random({kSeqs * kLength, kExperts}, DType::kFloat32, 3.0), bias = random({kExperts});
  const RouterOutputs whole = outputs(kSeqs * kLength, kExperts, options);
  const double balance = route(options, logits, bias, whole);
  Doubles sums(kSeqs * 2 * kExperts, 0.0), d_logits;
  const Tensor d_weights = random({kSeqs * kLength, 2}), d_whole = random(logits.shape());
  router_backward(context(), options, whole, d_weights, 0.5f, d_whole);
  for (options.first_token = 0; options.first_token < kSeqs * kLength; options.first_token += kTokens) {
    const std::int64_t first = options.first_token, end = first + kTokens;
    RouterOutputs part = outputs(kTokens, kExperts, options);
    part.balance_f_BE = whole.balance_f_BE;
    router_forward(context(), options, logits.rows(first, end), bias, part);
    const Tensor sums_of_rank = random({kSeqs, 2, kExperts}), d_part = random({kTokens, kExperts});
    balance_sums(context(), options, part.scores_TE, sums_of_rank);
    sums = plus(sums, doubles(sums_of_rank));
    router_backward(context(), options, part, d_weights.rows(first, end), 0.5f, d_part);
    EXPECT_EQ(doubles(d_part), doubles(d_whole.rows(first, end)));
  }
  const Tensor all = random({kSeqs, 2, kExperts}), f = random({kSeqs, kExperts});
  std::copy(sums.begin(), sums.end(), all.data<float>());
  EXPECT_NEAR(balance_of_sums(options, all, f), balance, kForwardBound * balance);
  EXPECT_EQ(doubles(f), doubles(whole.balance_f_BE));
}

TEST_F(Router, TokensBeyondTheSequencesThrow) {
  const RouterOptions options = alone({.top_k = 1, .balance_coefficient = 1.0f, .seq_len = 4});
  const Tensor sums = random({1, 2, 3});
  EXPECT_THROW(balance_sums(context(), options, random({6, 3}), sums), InternalError);
  EXPECT_THROW(router_backward(context(), options, outputs(6, 3, options), random({6, 1}), 1.0f, random({6, 3})),
               InternalError);
}

TEST_F(Router, GroupsThatHoldTooFewExpertsThrow) {
  for (const RouterOptions& wrong :
       {RouterOptions{.top_k = 3, .num_groups = 4, .num_limited_groups = 1},
        RouterOptions{.top_k = 1, .num_groups = 3, .num_limited_groups = 1}, RouterOptions{.top_k = 9}}) {
    EXPECT_THROW(router_forward(context(), wrong, random({6, 8}), random({8}), outputs(6, 8, wrong)), InternalError);
  }
}

TEST_F(Router, SameAtAnyNumberOfThreads) {
  // There are so many sequences that work space shared by two of them would show.
  constexpr std::int64_t kTokens = 40'000;
  const RouterOptions options = alone({.top_k = 2, .balance_coefficient = 0.1f, .seq_len = 100});
  const Tensor logits = random({kTokens, 8}), bias = random({8}), d_weights = random({kTokens, 2});
  const Tensor d_logits = random({kTokens, 8});
  const RouterOutputs out = outputs(kTokens, 8, options);
  expect_same_for_any_threads(
      [&] {
        route(options, logits, bias, out);
        router_backward(context(), options, out, d_weights, 1.0f, d_logits);
      },
      {out.scores_TE, out.expert_ids_TK, out.weights_TK, out.counts_E, out.balance_f_BE, d_logits});
}

}  // namespace
}  // namespace tessera
