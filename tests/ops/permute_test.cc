#include "ops/permute.h"

#include "tests/ops/harness.h"

namespace tessera {
namespace {

class Permute : public TypedOperatorTest {
 protected:
  // 4 tokens, 2 choices, 5 experts: expert 2 gets three slots, expert 3 none.
  const Tensor ids_ = ints({2, 0, 4, 2, 1, 2, 0, 4}, {4, 2});
  const Tensor counts_ = ints({2, 1, 3, 0, 2});
  const Tensor offsets_ = ints({9, 9, 9, 9, 9, 9}), slot_of_row_ = ints({9, 9, 9, 9, 9, 9, 9, 9});
  const Tensor row_of_slot_ = ints({9, 9, 9, 9, 9, 9, 9, 9}, {4, 2});
};

TEST_P(Permute, SortsSlotsByExpertKeepingTheirOrder) {
  sort_by_expert(context(), ids_, counts_, offsets_, slot_of_row_, row_of_slot_);
  EXPECT_EQ(doubles(offsets_), (Doubles{0, 2, 3, 6, 6, 8}));
  EXPECT_EQ(doubles(slot_of_row_), (Doubles{1, 6, 4, 0, 3, 5, 2, 7}));
  EXPECT_EQ(doubles(row_of_slot_), (Doubles{3, 0, 6, 4, 2, 5, 1, 7}));
}

TEST_P(Permute, CountsThatDoNotAddUpThrow) {
  EXPECT_THROW(sort_by_expert(context(), ids_, ints({1, 1, 1, 1, 1}), offsets_, slot_of_row_, row_of_slot_),
               InternalError);
}

TEST_P(Permute, GathersAndCombines) {
  sort_by_expert(context(), ids_, counts_, offsets_, slot_of_row_, row_of_slot_);
  constexpr std::int64_t kDim = 300;  // more than a block of sums
  const Tensor x = randoms({4, kDim}), rows = randoms({8, kDim}), y = randoms({4, kDim});
  gather_rows(context(), x, slot_of_row_, 2, rows);
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
  // Combining without weights is gathering's gradient: <gather(x), out> == <x, combine(out)>.
  combine_rows(context(), out, row_of_slot_, {}, y, Write::kAssign);
  EXPECT_NEAR(dot(doubles(rows), doubles(out)), dot(doubles(x), doubles(y)),
              bound_for(dtype(), kBackwardBound) * std::sqrt(dot(doubles(rows), doubles(rows))) * 10.0);
}

TESSERA_BOTH_TYPES(Permute);

}  // namespace
}  // namespace tessera
