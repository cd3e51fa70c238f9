#include "ops/routing/permute.h"

#include "ops/elementwise/elementwise.h"
#include "tests/ops/harness.h"

namespace tessera {
namespace {

class Permute : public TypedOperatorTest {
 protected:
  // 4 tokens have 2 choices among 5 experts. Expert 2 gets three slots, and expert 3 none.
  const Tensor ids_ = ints({2, 0, 4, 2, 1, 2, 0, 4}, {4, 2});
  const Tensor counts_ = ints({2, 1, 3, 0, 2});
  const Tensor offsets_ = ints({9, 9, 9, 9, 9, 9}), slot_of_row_ = ints({9, 9, 9, 9, 9, 9, 9, 9});
  const Tensor row_of_slot_ = ints({9, 9, 9, 9, 9, 9, 9, 9}, {4, 2});
};

TEST_P(Permute, SortsSlotsByExpertKeepingTheirOrder) {
  sort_by_expert(context(), ids_, counts_, 1, offsets_, slot_of_row_, row_of_slot_);
  EXPECT_EQ(doubles(offsets_), (Doubles{0, 2, 3, 6, 6, 8}));
  EXPECT_EQ(doubles(slot_of_row_), (Doubles{1, 6, 4, 0, 3, 5, 2, 7}));
  EXPECT_EQ(doubles(row_of_slot_), (Doubles{3, 0, 6, 4, 2, 5, 1, 7}));
}

TEST_P(Permute, CountsThatDoNotAddUpThrow) {
  EXPECT_THROW(sort_by_expert(context(), ids_, ints({1, 1, 1, 1, 1}), 1, offsets_, slot_of_row_, row_of_slot_),
               InternalError);
}

// The rank holds some of the experts. Slots of other ranks' experts have kNoExpert, and get no row.
TEST_P(Permute, SlotsWithoutAnExpertHaveNoRow) {
  const Tensor ids = ints({2, kNoExpert, kNoExpert, 2, 1, kNoExpert, 0, kNoExpert}, {4, 2});
  sort_by_expert(context(), ids, ints({1, 1, 2, 0, 0}), 1, offsets_, slot_of_row_, row_of_slot_);
  EXPECT_EQ(doubles(offsets_), (Doubles{0, 1, 2, 4, 4, 4}));
  EXPECT_EQ(doubles(slot_of_row_), (Doubles{6, 4, 0, 3, -1, -1, -1, -1}));
  EXPECT_EQ(doubles(row_of_slot_), (Doubles{2, -1, -1, 3, 1, -1, 0, -1}));
  EXPECT_THROW(sort_by_expert(context(), ids, ints({1, 1, 3, 0, 0}), 1, offsets_, slot_of_row_, row_of_slot_),
               InternalError);
}

TEST_P(Permute, GathersAndCombines) {
  sort_by_expert(context(), ids_, counts_, 1, offsets_, slot_of_row_, row_of_slot_);
  constexpr std::int64_t kDim = 300;  // more than a block of sums
  const Tensor x = randoms({4, kDim}), rows = randoms({8, kDim}), y = randoms({4, kDim});
  gather_rows(context(), x, slot_of_row_, 2, ints({8}), rows);
  for (std::int64_t r = 0; r < 8; ++r) {
    const std::int32_t token = slot_of_row_.data<std::int32_t>()[r] / 2;
    EXPECT_EQ(doubles(rows.rows(r, r + 1)), doubles(x.rows(token, token + 1)));
  }
  const Tensor out = randoms({8, kDim}), weights = random({4, 2});
  for (const Write write : {Write::kAssign, Write::kAccumulate}) {
    for (const Tensor& w : {weights, Tensor()}) {
      Doubles expected = write == Write::kAccumulate ? doubles(y) : Doubles(4 * kDim, 0.0);
      for (std::size_t slot = 0; slot < 8; ++slot) {
        const auto row = static_cast<std::size_t>(row_of_slot_.data<std::int32_t>()[slot]);
        for (std::size_t j = 0; j < kDim; ++j) {
          expected[slot / 2 * kDim + j] += (w.defined() ? doubles(w)[slot] : 1.0) * doubles(out)[row * kDim + j];
        }
      }
      combine_rows(context(), out, row_of_slot_, w, y, write);
      EXPECT_LE(relative_error(y, expected), bound_for(dtype(), kForwardBound));
    }
  }
  // With one choice of weight 1, rows come back unchanged.
  const Tensor identity = ints({3, 0, 2, 1}, {4, 1});
  combine_rows(context(), x, identity, {}, y, Write::kAssign);
  EXPECT_EQ(doubles(y.rows(0, 1)), doubles(x.rows(3, 4)));
  // Combining without weights is the gradient of gathering: <gather(x), out> == <x, combine(out)>.
  combine_rows(context(), out, row_of_slot_, {}, y, Write::kAssign);
  EXPECT_NEAR(dot(doubles(rows), doubles(out)), dot(doubles(x), doubles(y)),
              bound_for(dtype(), kBackwardBound) * std::sqrt(dot(doubles(rows), doubles(rows))) * 10.0);
}

// There are several tasks of tokens. All slots go to one expert, to the only expert, or to random ones.
TEST_P(Permute, ManyTokens) {
  constexpr std::int64_t kTokens = 150, kTopK = 3, kSlots = kTokens * kTopK, kDim = 5;
  const Philox philox(1, 2);
  for (const auto& [experts, only] : {std::pair<std::int64_t, bool>{7, false}, {7, true}, {1, false}}) {
    std::vector<std::int32_t> ids, counts(static_cast<std::size_t>(experts), 0);
    for (std::int64_t slot = 0; slot < kSlots; ++slot) {
      const auto any = philox.words(static_cast<std::uint64_t>(slot))[0] % static_cast<std::uint32_t>(experts);
      ids.push_back(only ? 5 : static_cast<std::int32_t>(any));
      ++counts[static_cast<std::size_t>(ids.back())];
    }
    Doubles offsets_expected{0.0}, slots_expected;
    for (std::int32_t e = 0; e < experts; ++e) {
      for (std::size_t slot = 0; slot < ids.size(); ++slot) {
        if (ids[slot] == e) slots_expected.push_back(static_cast<double>(slot));
      }
      offsets_expected.push_back(static_cast<double>(slots_expected.size()));
    }
    const Tensor offsets = ints(std::vector<std::int32_t>(static_cast<std::size_t>(experts + 1), -1));
    const Tensor slots = ints(std::vector<std::int32_t>(kSlots, -1));
    const Tensor rows = ints(std::vector<std::int32_t>(kSlots, -1), {kTokens, kTopK});
    sort_by_expert(context(), ints(ids, {kTokens, kTopK}), ints(counts), 1, offsets, slots, rows);
    EXPECT_EQ(doubles(offsets), offsets_expected);
    EXPECT_EQ(doubles(slots), slots_expected);
    for (std::int32_t r = 0; r < kSlots; ++r) {
      ASSERT_EQ(rows.data<std::int32_t>()[slots.data<std::int32_t>()[r]], r);
    }
    const Tensor x = randoms({kTokens, kDim}), there = randoms({kSlots, kDim}), back = randoms({kTokens, kDim});
    const Tensor weights = random({kTokens, kTopK});
    gather_rows(context(), x, slots, kTopK, ints({kSlots}), there);
    combine_rows(context(), there, rows, weights, back, Write::kAssign);
    Doubles expected = doubles(x);  // there and back: each row is multiplied by the sum of its weights
    for (std::size_t i = 0; i < expected.size(); ++i) {
      const Doubles w =
          doubles(weights.rows(static_cast<std::int64_t>(i) / kDim, static_cast<std::int64_t>(i) / kDim + 1));
      expected[i] *= w[0] + w[1] + w[2];
    }
    EXPECT_LE(relative_error(back, expected), bound_for(dtype(), kForwardBound));
  }
}

// Ranks have 3 experts each. The result equals combine_rows for each rank alone, and then for these sums.
TEST_P(Permute, CombinesRankByRank) {
  constexpr std::int64_t kDim = 300, kExpertsPerRank = 3, kRanks = 2;
  sort_by_expert(context(), ids_, counts_, 1, offsets_, slot_of_row_, row_of_slot_);
  const Tensor out = randoms({8, kDim}), weights = random({4, 2}), y = randoms({4, kDim});
  for (const Write write : {Write::kAssign, Write::kAccumulate}) {
    const Tensor sums = randoms({kRanks * 4, kDim}), expected = randoms({4, kDim});
    for (std::int64_t rank = 0; rank < kRanks; ++rank) {
      const Tensor of_rank = random({4, 2});
      for (std::int64_t slot = 0; slot < 8; ++slot) {
        const bool is_its = ids_.data<std::int32_t>()[slot] / kExpertsPerRank == rank;
        of_rank.data<float>()[slot] = is_its ? weights.data<float>()[slot] : 0.0f;
      }
      combine_rows(context(), out, row_of_slot_, of_rank, sums.rows(rank * 4, rank * 4 + 4), Write::kAssign);
    }
    copy(context(), y, expected);
    combine_rows(context(), sums, ints({0, 4, 1, 5, 2, 6, 3, 7}, {4, 2}), {}, expected, write);
    combine_rows_by_rank(context(), out, row_of_slot_, weights, ids_, kExpertsPerRank, y, write);
    EXPECT_EQ(doubles(y), doubles(expected));
  }
}

// Slots 1 and 6 have no row: the same as a weight of 0.
TEST_P(Permute, CombinesRankByRankWithoutSomeRows) {
  sort_by_expert(context(), ids_, counts_, 1, offsets_, slot_of_row_, row_of_slot_);
  const Tensor out = randoms({8, 30}), weights = random({4, 2}), y = randoms({4, 30}), expected = randoms({4, 30});
  const Tensor some_weights = random({4, 2});
  copy(context(), weights, some_weights);
  for (const std::int64_t slot : {1, 6}) some_weights.data<float>()[slot] = 0.0f;
  combine_rows_by_rank(context(), out, row_of_slot_, some_weights, ids_, 3, expected, Write::kAssign);
  for (const std::int64_t slot : {1, 6}) row_of_slot_.data<std::int32_t>()[slot] = -1;
  combine_rows_by_rank(context(), out, row_of_slot_, weights, ids_, 3, y, Write::kAssign);
  EXPECT_EQ(doubles(y), doubles(expected));
}

TEST_P(Permute, GathersRowsOfBytes) {
  const Tensor x = randoms({4, 7}), y = randoms({5, 7});
  const std::vector<std::int32_t> sources = {7, -1, 0, 1, 4};
  gather_row_bytes(context(), x, ints(sources), 2, y);
  for (std::size_t i = 0; i < sources.size(); ++i) {
    const auto row = static_cast<std::int64_t>(i);
    const std::int64_t from = sources[i] / 2;
    EXPECT_EQ(doubles(y.rows(row, row + 1)), sources[i] < 0 ? Doubles(7, 0.0) : doubles(x.rows(from, from + 1)));
  }
}

TEST_P(Permute, NumbersGoToRowsAndBack) {
  const Tensor slots = ints(std::vector<std::int32_t>(20, 9)), weights = random({4, 2}), there = random({20});
  sort_by_expert(context(), ids_, counts_, 4, offsets_, slots, row_of_slot_);
  gather_numbers(context(), weights, slots, there);
  for (std::int64_t r = 0; r < 20; ++r) {
    const std::int32_t slot = slots.data<std::int32_t>()[r];
    EXPECT_EQ(there.data<float>()[r], slot < 0 ? 0.0f : weights.data<float>()[slot]);
  }
  const Tensor back = random({4, 2});
  gather_numbers(context(), there, row_of_slot_, back);
  EXPECT_EQ(doubles(back), doubles(weights));
}

TEST_P(Permute, CombineIsTheGradientOfGather) {
  sort_by_expert(context(), ids_, counts_, 1, offsets_, slot_of_row_, row_of_slot_);
  const Tensor x = randoms({4, 3}), d_rows = randoms({8, 3}), d_x = randoms({4, 3});
  combine_rows(context(), d_rows, row_of_slot_, {}, d_x, Write::kAssign);
  const Doubles expected = central_differences(
      [&](const Doubles& v) {
        double sum = 0.0;
        for (std::size_t r = 0; r < 8; ++r) {
          const auto token = static_cast<std::size_t>(slot_of_row_.data<std::int32_t>()[r] / 2);
          for (std::size_t j = 0; j < 3; ++j) sum += v[token * 3 + j] * doubles(d_rows)[r * 3 + j];
        }
        return sum;
      },
      doubles(x));
  EXPECT_LE(relative_error(d_x, expected), bound_for(dtype(), kBackwardBound));
}

// Groups begin at multiples of 4: [1 6 . .] [4 . . .] [0 3 5 .] [] [2 7 . .] and then the rest.
TEST_P(Permute, PadsGroups) {
  ASSERT_EQ(max_rows(8, 5, 4), 20);
  EXPECT_EQ(max_rows(8, 5, 1), 8);
  const Tensor slots = ints(std::vector<std::int32_t>(20, 9));
  sort_by_expert(context(), ids_, counts_, 4, offsets_, slots, row_of_slot_);
  EXPECT_EQ(doubles(offsets_), (Doubles{0, 4, 8, 12, 12, 16}));
  EXPECT_EQ(doubles(slots), (Doubles{1, 6, -1, -1, 4, -1, -1, -1, 0, 3, 5, -1, 2, 7, -1, -1, -1, -1, -1, -1}));
  EXPECT_EQ(doubles(row_of_slot_), (Doubles{8, 0, 12, 9, 4, 10, 1, 13}));
  const Tensor x = randoms({4, 6}), rows = randoms({20, 6}), y = randoms({4, 6});
  gather_rows(context(), x, slots, 2, ints({16}), rows);
  for (std::int64_t r = 0; r < 20; ++r) {
    const std::int32_t slot = slots.data<std::int32_t>()[r];
    EXPECT_EQ(doubles(rows.rows(r, r + 1)), slot < 0 ? Doubles(6, 0.0) : doubles(x.rows(slot / 2, slot / 2 + 1)));
  }
  const Tensor first_choice = random({4, 2});
  for (std::int64_t slot = 0; slot < 8; ++slot) first_choice.data<float>()[slot] = slot % 2 == 0 ? 1.0f : 0.0f;
  combine_rows(context(), rows, row_of_slot_, first_choice, y, Write::kAssign);
  EXPECT_EQ(doubles(y), doubles(x));
}

TESSERA_BOTH_TYPES(Permute);

}  // namespace
}  // namespace tessera
