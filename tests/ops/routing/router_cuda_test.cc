#include "ops/routing/router.h"
#include "tests/ops/parity.h"

namespace tessera {
namespace {

class RouterCuda : public ParityTest {
 protected:
  RouterOutputs outputs(std::int64_t tokens, std::int64_t experts, const RouterOptions& options) {
    RouterOutputs out;
    out.scores_TE = poisoned({tokens, experts}, DType::kFloat32);
    out.expert_ids_TK = poisoned({tokens, options.top_k}, DType::kInt32);
    out.weights_TK = poisoned({tokens, options.top_k}, DType::kFloat32);
    out.counts_E = poisoned({experts}, DType::kInt32);
    if (options.balance_coefficient != 0.0f) {
      out.balance_f_BE = poisoned({tokens / options.seq_len, experts}, DType::kFloat32);
    }
    return out;
  }

  static RouterOutputs on(const Side& side, const RouterOutputs& out) {
    return {side(out.scores_TE), side(out.expert_ids_TK), side(out.weights_TK), side(out.counts_E),
            side(out.balance_f_BE)};
  }

  void forward(const RouterOptions& options, const Tensor& logits, const Tensor& bias, const RouterOutputs& out) {
    const auto run = [&](const Side& side) {
      router_forward(side.op, options, side(logits), side(bias), on(side, out));
    };
    expect_same(run, {out.expert_ids_TK, out.counts_E});
    expect_close(run, {out.scores_TE, out.weights_TK});
  }

  void check(const RouterOptions& options, std::int64_t tokens, std::int64_t experts) {
    SCOPED_TRACE(fmt::format("{} tokens {} experts top {}", tokens, experts, options.top_k));
    const ArenaScope scope(arena_);
    const Tensor logits = random({tokens, experts}, DType::kFloat32, 3.0);
    const Tensor bias = random({experts}, DType::kFloat32, 0.1);
    const RouterOutputs out = outputs(tokens, experts, options);
    forward(options, logits, bias, out);
    if (options.balance_coefficient != 0.0f) {
      const std::int64_t seqs = out.balance_f_BE.dim(0);
      const Tensor sums = poisoned({seqs, 2, experts}, DType::kFloat32);
      expect_close([&](const Side& side) { balance_sums(side.op, options, side(out.scores_TE), side(sums)); }, {sums});
      const Tensor loss = arena_.allocate({1}, DType::kFloat64);
      *loss.data<double>() = 0.5;
      expect_close(
          [&](const Side& side) { balance_loss(side.op, options, side(sums), side(out.balance_f_BE), side(loss)); },
          {out.balance_f_BE, loss});
    }
    const Tensor d_weights = random({tokens, options.top_k}), d_logits = poisoned({tokens, experts}, DType::kFloat32);
    expect_close(
        [&](const Side& side) {
          router_backward(side.op, options, on(side, out), side(d_weights), 0.25f, side(d_logits));
        },
        {d_logits}, kBackwardBound);
  }
};

TEST_F(RouterCuda, ForwardAndBackward) {
  for (const ScoreFunction function : {ScoreFunction::kSoftmax, ScoreFunction::kSigmoid}) {
    for (const bool norm : {false, true}) {
      const auto options = [&](std::int64_t top_k, std::int64_t groups = 0, std::int64_t limited = 0) {
        return RouterOptions{.score_function = function,
                             .route_norm = norm,
                             .route_scale = 2.5f,
                             .top_k = top_k,
                             .num_groups = groups,
                             .num_limited_groups = limited};
      };
      check(options(2), 1, 2);
      check(options(3), 150, 8);
      check(options(5), 77, 33);          // a tail of experts
      check(options(6), 1000, 64);        // the 16B model
      check(options(8, 8, 4), 500, 256);  // the 671B model
      check(options(4, 6, 2), 100, 90);   // groups that span lanes
      check(options(2, 12, 3), 100, 12);  // groups of one expert
      check(options(32), 40, 512);        // the most experts
    }
  }
}

TEST_F(RouterCuda, BalanceLoss) {
  RouterOptions options{.top_k = 6, .balance_coefficient = 0.01f, .seq_len = 300, .tokens_per_seq = 300};
  check(options, 900, 64);
  options.score_function = ScoreFunction::kSigmoid;
  check(options, 600, 256);
}

// This rank has a part of the sequences' tokens.
TEST_F(RouterCuda, BalanceSumsOfAPart) {
  RouterOptions options{
      .top_k = 2, .balance_coefficient = 1.0f, .seq_len = 100, .first_token = 130, .tokens_per_seq = 100};
  const Tensor scores = random({250, 16}), sums = poisoned({4, 2, 16}, DType::kFloat32);
  for (std::int64_t i = 0; i < scores.num_elements(); ++i) scores.data<float>()[i] += 1.5f;
  expect_close([&](const Side& side) { balance_sums(side.op, options, side(scores), side(sums)); }, {sums});
}

TEST_F(RouterCuda, TiesGoToTheLowerExpert) {
  const RouterOptions options{.score_function = ScoreFunction::kSigmoid, .top_k = 4};
  const Tensor logits = random({64, 100}), bias = random({100}, DType::kFloat32, 0.0);
  for (std::int64_t i = 0; i < logits.num_elements(); ++i) {
    logits.data<float>()[i] = static_cast<float>(i * i % 3);  // three values only
  }
  forward(options, logits, bias, outputs(64, 100, options));
  // Groups have the same score, too.
  RouterOptions groups = options;
  groups.num_groups = 10;
  groups.num_limited_groups = 3;
  for (std::int64_t i = 0; i < logits.num_elements(); ++i) logits.data<float>()[i] = 0.5f;
  forward(groups, logits, bias, outputs(64, 100, groups));
}

TEST_F(RouterCuda, ForcedBalanceAndNan) {
  RouterOptions options{.score_function = ScoreFunction::kSigmoid, .top_k = 3, .force_load_balance = true};
  check(options, 100, 64);
  options.force_load_balance = false;
  const Tensor logits = random({9, 40}), bias = random({40});
  for (std::int64_t t = 0; t < 9; ++t) logits.data<float>()[t * 40 + t * 4] = NAN;
  const RouterOutputs out = outputs(9, 40, options);
  const auto run = [&](const Side& side) { router_forward(side.op, options, side(logits), side(bias), on(side, out)); };
  expect_same(run, {out.expert_ids_TK, out.counts_E});
  options.score_function = ScoreFunction::kSoftmax;
  expect_same(run, {out.expert_ids_TK, out.counts_E});
}

}  // namespace
}  // namespace tessera
