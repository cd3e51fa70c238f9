#include "ep/domain_plan.h"

#include "ops/routing/permute.h"
#include "tests/ops/harness.h"

namespace tessera {
namespace {

// There are 3 domains with 2 experts each. Three tokens choose 3 experts: of one domain, of all, and of none and two.
class DomainPlan : public OperatorTest {
 protected:
  static constexpr std::int32_t kNo = kNoExpert;

  const Tensor ids_TK_ = ints({3, 2, kNo, 4, 1, 2, kNo, 5, 0}, {3, 3});
  const Tensor domain_TN_ = unset_ints({3, 3}), num_tokens_N_ = unset_ints({3});
};

TEST_F(DomainPlan, FindsTheDomainsOfTokens) {
  find_domains(context(), ids_TK_, 2, domain_TN_, num_tokens_N_);
  EXPECT_EQ(doubles(domain_TN_), (Doubles{kNo, 1, kNo, 0, 1, 2, 0, kNo, 2}));
  EXPECT_EQ(doubles(num_tokens_N_), (Doubles{2, 2, 2}));
  EXPECT_THROW(find_domains(context(), ids_TK_, 1, domain_TN_, num_tokens_N_), InternalError);  // expert 5 of 3
}

TEST_F(DomainPlan, AllTokensMayCrossToAllDomains) {
  const Tensor entries = unset_ints({9}), sent = unset_ints({3, 3}), offsets = unset_ints({4}),
               numbers = unset_ints({3, 3});
  take_all_domains(context(), domain_TN_, num_tokens_N_);
  EXPECT_EQ(doubles(domain_TN_), (Doubles{0, 1, 2, 0, 1, 2, 0, 1, 2}));
  EXPECT_EQ(doubles(num_tokens_N_), (Doubles{3, 3, 3}));
  sort_by_expert(context(), domain_TN_, num_tokens_N_, 1, offsets, entries, sent);
  EXPECT_EQ(doubles(entries), (Doubles{0, 3, 6, 1, 4, 7, 2, 5, 8}));
  place_choices(context(), ids_TK_, 2, sent, numbers);
  EXPECT_EQ(doubles(sent), (Doubles{0, 3, 6, 1, 4, 7, 2, 5, 8}));
  EXPECT_EQ(doubles(numbers), (Doubles{9, 10, -1, 21, 4, 14, -1, 25, 8}));
}

// What is sent is tokens 1 and 2 for domain 0, 0 and 1 for domain 1, 1 and 2 for domain 2.
TEST_F(DomainPlan, PlacesChoicesAmongWhatIsSent) {
  const Tensor entries = unset_ints({9}), sent = unset_ints({3, 3}), offsets = unset_ints({4}),
               numbers = unset_ints({3, 3});
  find_domains(context(), ids_TK_, 2, domain_TN_, num_tokens_N_);
  sort_by_expert(context(), domain_TN_, num_tokens_N_, 1, offsets, entries, sent);
  EXPECT_EQ(doubles(entries), (Doubles{3, 6, 1, 4, 5, 8, -1, -1, -1}));
  place_choices(context(), ids_TK_, 2, sent, numbers);
  EXPECT_EQ(doubles(sent), (Doubles{9, 2, 9, 0, 3, 4, 1, 9, 5}));
  EXPECT_EQ(doubles(numbers), (Doubles{6, 7, -1, 12, 1, 11, -1, 16, 5}));
}

// Domain 1 has received two tokens. The third one is not defined.
TEST_F(DomainPlan, MakesIdsThoseOfADomain) {
  const Tensor ids = ints({3, 2, kNo, 4, 1, 2, 2, 3, 2}, {3, 3}), counts = unset_ints({2});
  localize_experts(context(), 2, ints({1, 0, 1}), ids, counts);
  EXPECT_EQ(doubles(ids), (Doubles{1, 0, kNo, kNo, kNo, 0, kNo, kNo, kNo}));
  EXPECT_EQ(doubles(counts), (Doubles{2, 1}));
}

}  // namespace
}  // namespace tessera
