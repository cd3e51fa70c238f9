#include "ep/exchange_plan.h"

#include "ops/routing/permute.h"
#include "tests/ops/harness.h"

namespace tessera {
namespace {

// There are two ranks with two experts each, in groups of 4. Rank 0's experts get 3 + 2 and 0 + 3 rows, rank 1's none
// and one. With room for 4 rows, rank 0 needs three rounds: rows [0, 3) of rank 0, [3, 5) and [8, 11) of rank 1.
class ExchangePlan : public OperatorTest {
 protected:
  static constexpr std::int32_t kNo = kNoExpert;

  void place(std::int64_t round, std::int64_t room) {
    place_round(context(), counts_PE_, 4, round, room, first_row_PE_, num_rounds_1_);
  }
  /// Plans the exchange of a rank in a round with room for 4 rows.
  void exchange(std::int64_t rank, std::int64_t round) {
    place(round, 4);
    plan_exchange(context(), counts_PE_, first_row_PE_, rank, 4, offsets_e1_, source_of_row_R_, row_of_received_R_,
                  num_sent_P_, num_received_P_);
  }

  const Tensor counts_PE_ = ints({3, 0, 0, 1, 2, 3, 0, 0}, {2, 4});
  const Tensor first_row_PE_ = unset_ints({2, 4}), num_rounds_1_ = unset_ints({1});
  const Tensor offsets_e1_ = unset_ints({3}), source_of_row_R_ = unset_ints({4}), row_of_received_R_ = unset_ints({4});
  const Tensor num_sent_P_ = unset_ints({2}), num_received_P_ = unset_ints({2});
};

TEST_F(ExchangePlan, PlacesRows) {
  place(0, 12);
  EXPECT_EQ(doubles(first_row_PE_), (Doubles{0, 8, 0, 0, 3, 8, 0, 1}));
  EXPECT_EQ(doubles(num_rounds_1_), Doubles{1});
  place(0, 8);
  EXPECT_EQ(doubles(num_rounds_1_), Doubles{2});
  place(1, 4);
  EXPECT_EQ(doubles(first_row_PE_), (Doubles{-4, 4, -4, -4, -1, 4, -4, -3}));
  EXPECT_EQ(doubles(num_rounds_1_), Doubles{3});
}

TEST_F(ExchangePlan, KeepsTheChoicesOfARound) {
  const Tensor ids = ints({1, 0, 1, kNo, 1, 0}, {3, 2}), round_ids = unset_ints({3, 2}), kept = unset_ints({4});
  const auto keep = [&](std::int64_t round) {  // of rank 1
    place(round, 4);
    keep_round(context(), ids, counts_PE_[1], first_row_PE_[1], 4, round_ids, kept);
  };
  keep(0);
  EXPECT_EQ(doubles(round_ids), (Doubles{kNo, 0, kNo, kNo, kNo, kNo}));
  EXPECT_EQ(doubles(kept), (Doubles{1, 0, 0, 0}));
  keep(1);
  EXPECT_EQ(doubles(round_ids), (Doubles{kNo, kNo, kNo, kNo, kNo, 0}));
  EXPECT_EQ(doubles(kept), (Doubles{1, 0, 0, 0}));
  keep(2);
  EXPECT_EQ(doubles(round_ids), (Doubles{1, kNo, 1, kNo, 1, kNo}));
  EXPECT_EQ(doubles(kept), (Doubles{0, 3, 0, 0}));
  // Counts that differ from the ids throw.
  EXPECT_THROW(keep_round(context(), ids, counts_PE_[0], first_row_PE_[1], 4, round_ids, kept), InternalError);
}

TEST_F(ExchangePlan, PlansWhatCrosses) {
  exchange(0, 0);
  EXPECT_EQ(doubles(offsets_e1_), (Doubles{0, 4, 4}));
  EXPECT_EQ(doubles(source_of_row_R_), (Doubles{0, 1, 2, 3}));
  EXPECT_EQ(doubles(row_of_received_R_), (Doubles{0, 1, 2, 3}));
  EXPECT_EQ(doubles(num_sent_P_), (Doubles{3, 1}));
  EXPECT_EQ(doubles(num_received_P_), (Doubles{3, 1}));
  exchange(0, 1);
  EXPECT_EQ(doubles(offsets_e1_), (Doubles{0, 4, 4}));
  EXPECT_EQ(doubles(source_of_row_R_), (Doubles{0, -1, -1, -1}));
  EXPECT_EQ(doubles(row_of_received_R_), (Doubles{0, -1, -1, -1}));
  EXPECT_EQ(doubles(num_sent_P_), (Doubles{0, 0}));
  EXPECT_EQ(doubles(num_received_P_), (Doubles{0, 1}));
  exchange(0, 2);
  EXPECT_EQ(doubles(offsets_e1_), (Doubles{0, 0, 4}));
  EXPECT_EQ(doubles(source_of_row_R_), (Doubles{0, 1, 2, -1}));
  exchange(1, 0);
  EXPECT_EQ(doubles(offsets_e1_), (Doubles{0, 0, 4}));
  EXPECT_EQ(doubles(source_of_row_R_), (Doubles{0, -1, -1, -1}));
  EXPECT_EQ(doubles(num_sent_P_), (Doubles{1, 0}));
  EXPECT_EQ(doubles(num_received_P_), (Doubles{1, 0}));
}

// With one round, received rows are ordered by source and rows by expert.
TEST_F(ExchangePlan, OrdersReceivedRowsBySource) {
  place(0, 12);
  const Tensor source_of_row = unset_ints({12}), row_of_received = unset_ints({12});
  plan_exchange(context(), counts_PE_, first_row_PE_, 0, 4, offsets_e1_, source_of_row, row_of_received, num_sent_P_,
                num_received_P_);
  EXPECT_EQ(doubles(offsets_e1_), (Doubles{0, 8, 12}));
  EXPECT_EQ(doubles(source_of_row), (Doubles{0, 1, 2, 3, 4, -1, -1, -1, 5, 6, 7, -1}));
  EXPECT_EQ(doubles(row_of_received), (Doubles{0, 1, 2, 3, 4, 8, 9, 10, -1, -1, -1, -1}));
}

TEST_F(ExchangePlan, IsMeasured) {
  expect_measured([](const Context& op) {
    const auto tensor = [&](const Shape& shape, std::int32_t value = 0) {
      const Tensor x = op.arena->allocate(shape, DType::kInt32);
      if (!op.measuring()) std::fill_n(x.data<std::int32_t>(), x.num_elements(), value);
      return x;
    };
    const Tensor counts = tensor({3, 12}), first_row = tensor({3, 12}), ids = tensor({9, 2}, kNo);
    place_round(op, counts, 4, 0, 32, first_row, tensor({1}));
    plan_exchange(op, counts, first_row, 1, 4, tensor({5}), tensor({32}), tensor({32}), tensor({3}), tensor({3}));
    keep_round(op, ids, counts[1], first_row[1], 32, tensor({9, 2}), tensor({12}));
  });
}

}  // namespace
}  // namespace tessera
