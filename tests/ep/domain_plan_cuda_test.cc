#include "ep/domain_plan.h"
#include "ops/elementwise/elementwise.h"
#include "ops/routing/permute.h"
#include "tests/ops/parity.h"

namespace tessera {
namespace {

struct DomainCase {
  std::int64_t num_domains, experts_per_domain, num_tokens, top_k;
};

// The cases are one token; a block and a tail; the sizes of a large model; and many domains.
constexpr DomainCase kCases[] = {{2, 3, 1, 2}, {3, 4, 130, 6}, {32, 8, 4099, 8}, {4, 64, 8192, 8}, {1024, 1, 70, 3}};

class DomainPlanCuda : public ParityTest {
 protected:
  Tensor drawn(const DomainCase& its) {
    const Philox philox(5, static_cast<std::uint32_t>(its.num_tokens));
    std::vector<std::int32_t> ids;
    for (std::int64_t slot = 0; slot < its.num_tokens * its.top_k; ++slot) {
      const std::uint32_t word = philox.words(static_cast<std::uint64_t>(slot))[0];
      const auto num_experts = static_cast<std::uint32_t>(its.num_domains * its.experts_per_domain);
      ids.push_back(word % 7 == 0 ? kNoExpert : static_cast<std::int32_t>(word % num_experts));
    }
    return ints(ids, {its.num_tokens, its.top_k});
  }
};

TEST_F(DomainPlanCuda, WhatIsSent) {
  for (const DomainCase& its : kCases) {
    SCOPED_TRACE(testing::Message() << its.num_domains << " domains, " << its.num_tokens << " tokens");
    const ArenaScope scope(arena_);
    const auto out = [&](const Shape& shape) { return poisoned(shape, DType::kInt32); };
    const std::int64_t domains = its.num_domains, tokens = its.num_tokens;
    const Tensor ids = drawn(its), token_of_sent = out({tokens * domains}), sent_of_token = out({tokens, domains});
    const Tensor number_of_slot = out({tokens, its.top_k}), num_sent = out({domains});
    expect_same(
        [&](const Side& side) {
          plan_crossing(side.op, side(ids), its.experts_per_domain,
                        {.token_of_sent_M = side(token_of_sent),
                         .sent_of_token_TN = side(sent_of_token),
                         .number_of_slot_TK = side(number_of_slot),
                         .num_sent_N = side(num_sent)});
        },
        {token_of_sent, sent_of_token, number_of_slot, num_sent});
  }
}

TEST_F(DomainPlanCuda, WhatIsReceived) {
  for (const DomainCase& its : kCases) {
    SCOPED_TRACE(testing::Message() << its.num_domains << " domains, " << its.num_tokens << " tokens");
    const ArenaScope scope(arena_);
    const std::int64_t part = (its.num_tokens + its.num_domains - 1) / its.num_domains;
    DomainCase parts = its;
    parts.num_tokens = part * its.num_domains;
    const Tensor drawn_ids = drawn(parts), ids = poisoned({parts.num_tokens, its.top_k}, DType::kInt32);
    const Tensor counts = poisoned({its.experts_per_domain}, DType::kInt32);
    std::vector<std::int32_t> received;
    for (std::int64_t n = 0; n < its.num_domains; ++n)
      received.push_back(static_cast<std::int32_t>(part * (n % 3) / 2));
    const Tensor num_received = ints(received);
    expect_same(
        [&](const Side& side) {
          copy(side.op, side(drawn_ids), side(ids));
          localize_experts(side.op, its.experts_per_domain, side(num_received), side(ids), side(counts));
        },
        {ids, counts});
  }
}

}  // namespace
}  // namespace tessera
