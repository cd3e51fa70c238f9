// A load beyond a rank's room is worked off in rounds. Their results are those of one round with room for all.
#include "ep/placement.h"
#include "ops/elementwise/elementwise.h"
#include "tests/ep/cpu_ranks.h"

namespace tessera {
namespace {

using ep_test::Case;
using ep_test::CrossedTokens;
using ep_test::Domains;
using ep_test::Layer;
using ep_test::Memory;
using ep_test::on_ranks;
using ep_test::Skew;

Tensor ints(std::vector<std::int32_t>& values, const Shape& shape) {
  return Tensor(values.data(), shape, DType::kInt32, Device::kCpu);
}

// Two ranks with two experts each, groups of 4. Rank 0's experts get 5 and 3 rows, rank 1's none and one.
TEST(Rounds, APlacementIsCut) {
  std::vector<std::int32_t> counts = {3, 0, 0, 1, 2, 3, 0, 0}, first_rows(8), offsets(6);
  const ep::Placement placement{.first_row_PE = ints(first_rows, {2, 4}), .offsets_Pe1 = ints(offsets, {2, 3})};
  const auto place = [&] { ep::place_rows(ints(counts, {2, 4}), 4, placement); };
  place();
  EXPECT_EQ(offsets, (std::vector<std::int32_t>{0, 8, 12, 0, 0, 4}));
  EXPECT_EQ(ep::count_rounds(placement, 12), 1);
  EXPECT_EQ(ep::count_rounds(placement, 8), 2);
  EXPECT_EQ(ep::count_rounds(placement, 4), 3);
  ep::cut_to_round(placement, 0, 4);
  EXPECT_EQ(offsets, (std::vector<std::int32_t>{0, 4, 4, 0, 0, 4}));
  EXPECT_EQ(ep::rows_in_round(first_rows[4], 2, 4).begin, 3);  // the second rank's rows for expert 0: 3 and 4
  EXPECT_EQ(ep::rows_in_round(first_rows[4], 2, 4).end, 4);
  place();
  ep::cut_to_round(placement, 1, 4);
  EXPECT_EQ(offsets, (std::vector<std::int32_t>{0, 4, 4, 0, 0, 0}));
  EXPECT_EQ(ep::rows_in_round(first_rows[4], 2, 4).begin, 0);
  EXPECT_EQ(ep::rows_in_round(first_rows[4], 2, 4).end, 1);
  EXPECT_EQ(ep::rows_in_round(first_rows[0], 3, 4).size(), 0);
  place();
  ep::cut_to_round(placement, 2, 4);
  EXPECT_EQ(offsets, (std::vector<std::int32_t>{0, 0, 4, 0, 0, 0}));
}

/// Holds the results of a pass of a layer whose experts multiply their rows by a small number.
struct Results {
  Doubles y, d_y, d_weights;
  std::int64_t num_rounds = 0;
};

/// Multiplies every group of rows by 1, 2 or 3, by the number of its expert.
void multiply(const Tensor& x_RD, const Tensor& offsets_e1, std::int64_t first_expert, const Tensor& out_RD) {
  const auto* offsets = offsets_e1.data<std::int32_t>();
  for (std::int64_t e = 0; e + 1 < offsets_e1.dim(0); ++e) {
    for (std::int64_t i = offsets[e] * x_RD.dim(1); i < offsets[e + 1] * x_RD.dim(1); ++i) {
      out_RD.data<float>()[i] = x_RD.data<float>()[i] * static_cast<float>(1 + (first_expert + e) % 3);
    }
  }
}

Results run(Dispatcher& dispatcher, const Layer& layer, const ProcessGroup& group, const Context& op) {
  const Case& test_case = layer.test_case();
  const std::int64_t first_expert = group.rank() * test_case.num_experts / group.size();
  const TokenRouting routing = layer.tensors(*op.arena, group.rank());
  const DispatchLayer name{.name = "layers.7.moe", .alignment = test_case.alignment};
  const Tensor tokens = layer.tokens(*op.arena, "y", group.rank());
  const Tensor d_tokens = layer.tokens(*op.arena, "dy", group.rank());
  const Tensor y = op.arena->allocate(tokens.shape(), DType::kFloat32);
  const Tensor d_y = op.arena->allocate(tokens.shape(), DType::kFloat32);
  Results results;
  std::vector<DispatchSaved> rounds;
  const DispatchSaved first = dispatcher.allocate_saved(op, name, routing);
  const Tensor d_weights = op.arena->allocate(routing.weights_tK.shape(), DType::kFloat32);
  const CrossedTokens crossed(op, dispatcher, first,
                              {.y = tokens, .d_y = d_tokens, .out = y, .d_in = d_y, .d_weights = d_weights});
  crossed.begin_forward();
  std::int64_t num_rounds = 1;
  for (std::int64_t round = 0; round < num_rounds; ++round) {
    rounds.push_back(round == 0 ? first : dispatcher.allocate_later(op, first, round));
    const DispatchSaved& saved = rounds.back();
    const Tensor x = op.arena->allocate({saved.num_rows(), test_case.dim}, DType::kFloat32);
    dispatcher.dispatch(op, crossed.y, saved, x);
    EXPECT_LE(saved.num_rows_1().data<std::int32_t>()[0], saved.num_rows());
    if (round == 0) num_rounds = dispatcher.num_rounds(op, saved);
    multiply(x, saved.offsets_e1, first_expert, x);
    dispatcher.combine(op, x, saved, crossed.out, round == 0 ? Write::kAssign : Write::kAccumulate);
  }
  crossed.end_forward();
  crossed.begin_backward();
  for (const DispatchSaved& saved : rounds) {
    const Tensor x = op.arena->allocate({saved.num_rows(), test_case.dim}, DType::kFloat32);
    dispatcher.dispatch_again(op, crossed.y, saved, x);
    const Tensor d_out = op.arena->allocate(x.shape(), DType::kFloat32);
    dispatcher.combine_backward(op, crossed.d_y, saved, d_out);
    multiply(d_out, saved.offsets_e1, first_expert, d_out);
    const Tensor d_weights_R = op.arena->allocate({saved.num_rows()}, DType::kFloat32);
    for (std::int64_t r = 0; r < saved.num_rows_1().data<std::int32_t>()[0]; ++r) {
      d_weights_R.data<float>()[r] = x.data<float>()[r * test_case.dim] * d_out.data<float>()[r * test_case.dim + 1];
    }
    const Tensor of_round = op.arena->allocate(crossed.d_weights.shape(), DType::kFloat32);
    dispatcher.dispatch_backward(op, d_out, d_weights_R, saved, crossed.d_in,
                                 saved.round == 0 ? Write::kAssign : Write::kAccumulate, of_round);
    if (saved.round == 0) {
      copy(op, of_round, crossed.d_weights);
    } else {
      add(op, crossed.d_weights, of_round, crossed.d_weights);
    }
  }
  crossed.end_backward();
  results.y = doubles(y);
  results.d_y = doubles(d_y);
  results.d_weights = doubles(d_weights);
  results.num_rounds = num_rounds;
  return results;
}

/// Compares a capacity factor of 1 with room for any load. All numbers are exact, so results are the same bits. The
/// last domain has num_rounds, and others have one.
void expect_as_in_one_round(const Case& test_case, DispatchBackend backend, int num_ranks, std::uint64_t seed,
                            std::int64_t num_rounds) {
  on_ranks(num_ranks, seed, [&](ProcessGroup& group, ep::StepHook* hook) {
    Domains domains(group, test_case.num_domains);
    const auto make = [&](double capacity_factor) {
      Case with_factor = test_case;
      with_factor.capacity_factor = capacity_factor;
      const bool is_direct = backend == DispatchBackend::kDirect;
      auto made = is_direct ? domains.make_direct(with_factor.options(), hook)
                            : make_dispatcher(backend, group, with_factor.options(), hook);
      made->allocate();
      return made;
    };
    const bool is_overloaded = group.rank() / (group.size() / test_case.num_domains) == test_case.num_domains - 1;
    const auto roomy = make(0.0), tight = make(1.0);
    EXPECT_FALSE(roomy->has_rounds());
    EXPECT_TRUE(tight->has_rounds());
    for (std::uint64_t pass = 1; pass <= 3; ++pass) {  // the second fits, and the third does not again
      Case of_pass = test_case;
      if (pass == 2) of_pass.skew = Skew::kForced;
      const Layer layer(of_pass, group.size(), pass);
      Memory memory(ep_test::kLargeArenaBytes);
      const Results one = run(*roomy, layer, group, memory.op()), many = run(*tight, layer, group, memory.op());
      EXPECT_EQ(one.num_rounds, 1);
      EXPECT_EQ(many.num_rounds, pass == 2 || !is_overloaded ? 1 : num_rounds);
      EXPECT_EQ(many.y, one.y);
      EXPECT_EQ(many.d_y, one.d_y);
      EXPECT_EQ(many.d_weights, one.d_weights);
    }
  });
}

// All rows are of one rank, which has room for those of a balanced load: there are as many rounds as ranks. With an
// alignment of 1 there is no padding that could take rows.
TEST(Rounds, AllRowsGoToOneRank) {
  for (const DispatchBackend backend : {DispatchBackend::kStandard, DispatchBackend::kDirect}) {
    for (std::uint64_t seed = 0; seed <= 2; ++seed) {
      expect_as_in_one_round({.num_tokens = 36, .skew = Skew::kOneRank}, backend, 2, seed, 2);
      expect_as_in_one_round({.num_tokens = 36, .skew = Skew::kOneRank}, backend, 4, seed, 4);
    }
  }
}

TEST(Rounds, AllRowsGoToOneExpert) {
  for (const DispatchBackend backend : {DispatchBackend::kStandard, DispatchBackend::kDirect}) {
    // Each of 3 ranks has room for 36 rows and for 3 of padding per expert: 48. There are 108.
    const Case test_case{.num_tokens = 36, .top_k = 1, .alignment = 4, .skew = Skew::kOneExpert};
    expect_as_in_one_round(test_case, backend, 3, 1, 3);
  }
}

TEST(Rounds, OverSeveralDomains) {
  for (std::uint64_t seed = 0; seed <= 2; ++seed) {
    const Case test_case{.num_tokens = 36, .skew = Skew::kOneRank, .num_domains = 2};
    expect_as_in_one_round(test_case, DispatchBackend::kDirect, 4, seed, 4);
    const Case of_three{.num_tokens = 36, .num_experts = 18, .skew = Skew::kOneRank, .num_domains = 3};
    expect_as_in_one_round(of_three, DispatchBackend::kDirect, 6, seed, 6);
  }
}

// After a later round's call, the other pass makes none. After one of the first round, it may.
TEST(Rounds, InTurnsLaterOnesAloneLeaveRowsInTheWindow) {
  on_ranks(2, 0, [&](ProcessGroup& group, ep::StepHook*) {
    const Case test_case{.capacity_factor = 1.0};
    Turns turns;
    Memory memory;
    const Context op = memory.op();
    const auto dispatcher = ep_test::allocated_dispatcher(DispatchBackend::kDirect, group, test_case.options());
    const Layer layer(test_case, group.size(), 1);
    const DispatchSaved first = dispatcher->allocate_saved(op, {.name = "layer"}, layer.tensors(memory.arena, 0));
    const DispatchSaved later = dispatcher->allocate_later(op, first, 1);
    for (const bool in_turns : {false, true}) {
      if (in_turns) dispatcher->set_turns(&turns);
      EXPECT_EQ(dispatcher->rows_in_window(op, first).defined(), !in_turns);
      EXPECT_EQ(dispatcher->gradients_in_window(op, first).defined(), !in_turns);
      EXPECT_TRUE(dispatcher->rows_in_window(op, later).defined());
      EXPECT_TRUE(dispatcher->gradients_in_window(op, later).defined());
    }
  });
}

}  // namespace
}  // namespace tessera
