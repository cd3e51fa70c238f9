#include "ep/domain_plan.h"

#include "ops/routing/permute.h"
#include "tests/ops/harness.h"

namespace tessera {
namespace {

class DomainPlan : public OperatorTest {
 protected:
  static constexpr std::int32_t kNo = kNoExpert;
};

// There are 3 domains with 2 experts each. Three tokens choose 3 experts: of one domain, of all, and of none and two.
TEST_F(DomainPlan, PlacesTokensAndChoices) {
  const Tensor ids_TK = ints({3, 2, kNo, 4, 1, 2, kNo, 5, 0}, {3, 3});
  const Crossing crossing{.token_of_sent_M = unset_ints({9}),
                          .sent_of_token_TN = unset_ints({3, 3}),
                          .number_of_slot_TK = unset_ints({3, 3}),
                          .num_sent_N = unset_ints({3})};
  plan_crossing(context(), ids_TK, 2, crossing);
  EXPECT_EQ(doubles(crossing.num_sent_N), (Doubles{2, 2, 2}));
  EXPECT_EQ(doubles(crossing.token_of_sent_M), (Doubles{1, 2, -1, 0, 1, -1, 1, 2, -1}));
  EXPECT_EQ(doubles(crossing.sent_of_token_TN), (Doubles{9, 3, 9, 0, 4, 6, 1, 9, 7}));
  EXPECT_EQ(doubles(crossing.number_of_slot_TK), (Doubles{9, 10, -1, 18, 1, 14, -1, 22, 5}));
  EXPECT_THROW(plan_crossing(context(), ids_TK, 1, crossing), InternalError);  // expert 5 of 3
}

// Each of three domains has sent a part with room for two tokens: one, none and two. The other places are not defined.
TEST_F(DomainPlan, MakesIdsThoseOfADomain) {
  const Tensor ids = ints({3, 2, 2, 3, 2, 3, 2, 2, kNo, 4, 1, 2}, {6, 2}), counts = unset_ints({2});
  localize_experts(context(), 2, ints({1, 0, 2}), ids, counts);
  EXPECT_EQ(doubles(ids), (Doubles{1, 0, kNo, kNo, kNo, kNo, kNo, kNo, kNo, kNo, kNo, 0}));
  EXPECT_EQ(doubles(counts), (Doubles{2, 1}));
}

}  // namespace
}  // namespace tessera
