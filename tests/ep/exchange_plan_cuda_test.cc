#include "ep/exchange_plan.h"
#include "ops/routing/permute.h"
#include "tests/ops/parity.h"

namespace tessera {
namespace {

struct PlanCase {
  std::int64_t num_ranks, num_experts, num_tokens, top_k, alignment;
  std::int64_t num_used;  // experts from here on get no rows
  double room;            // in units of the balanced load
  bool all_have = true;   // otherwise some choices have no expert
};

class ExchangePlanCuda : public ParityTest {
 protected:
  /// Draws the experts of all ranks' tokens, and counts them.
  void draw(const PlanCase& its) {
    const Philox philox(3, static_cast<std::uint32_t>(its.num_tokens + its.num_used));
    const std::int64_t num_slots = its.num_tokens * its.top_k;
    std::vector<std::int32_t> ids, counts(static_cast<std::size_t>(its.num_ranks * its.num_experts), 0);
    for (std::int64_t slot = 0; slot < its.num_ranks * num_slots; ++slot) {
      const std::uint32_t word = philox.words(static_cast<std::uint64_t>(slot))[0];
      const bool has_expert = its.all_have || word % 5 != 0;
      ids.push_back(has_expert ? static_cast<std::int32_t>(word % static_cast<std::uint32_t>(its.num_used))
                               : kNoExpert);
      if (has_expert) ++counts[static_cast<std::size_t>(slot / num_slots * its.num_experts + ids.back())];
    }
    all_ids_ = ints(ids, {its.num_ranks * its.num_tokens, its.top_k});
    counts_PE_ = ints(counts, {its.num_ranks, its.num_experts});
  }

  Tensor all_ids_, counts_PE_;
};

// The cases are one rank; a few rows; one expert with many slots and without room; many experts; as many experts as
// there may be, with a rank for each.
TEST_F(ExchangePlanCuda, RoundsOfDispatches) {
  for (const PlanCase& its : {PlanCase{1, 4, 50, 2, 1, 4, 1.0},
                              {2, 6, 37, 3, 4, 6, 1.2, false},
                              {4, 8, 700, 4, 16, 1, 1.0},
                              {3, 12, 1500, 6, 1, 4, 1.1},
                              {8, 256, 1024, 8, 128, 256, 1.05},
                              {8, 256, 1024, 8, 32, 40, 1.5, false},
                              {64, 1024, 100, 8, 16, 300, 1.0},
                              {1024, 1024, 3, 2, 1, 1024, 4.0}}) {
    const ArenaScope scope(arena_);
    draw(its);
    const std::int64_t ranks = its.num_ranks, experts = its.num_experts, local = experts / ranks;
    const auto room = tessera::max_rows(
        static_cast<std::int64_t>(its.room * static_cast<double>(its.num_tokens * its.top_k)), local, its.alignment);
    for (const std::int64_t round : {0, 1, 2, 40}) {
      for (const std::int64_t rank : {std::int64_t{0}, ranks / 2, ranks - 1}) {
        SCOPED_TRACE(testing::Message() << ranks << " ranks, " << experts << " experts, round " << round);
        const ArenaScope outputs(arena_);
        const auto out = [&](const Shape& shape) { return poisoned(shape, DType::kInt32); };
        const Tensor first_row = out({ranks, experts}), num_rounds = out({1}), offsets = out({local + 1});
        const Tensor source_of_row = out({room}), row_of_received = out({room});
        const Tensor num_sent = out({ranks}), num_received = out({ranks});
        const Tensor round_ids = out({its.num_tokens, its.top_k}), kept = out({experts});
        const Tensor ids = all_ids_.rows(rank * its.num_tokens, (rank + 1) * its.num_tokens);
        expect_same(
            [&](const Side& side) {
              place_round(side.op, side(counts_PE_), its.alignment, round, room, side(first_row), side(num_rounds));
              plan_exchange(side.op, side(counts_PE_), side(first_row), rank, its.alignment, side(offsets),
                            side(source_of_row), side(row_of_received), side(num_sent), side(num_received));
              keep_round(side.op, side(ids), side(counts_PE_[rank]), side(first_row[rank]), room, side(round_ids),
                         side(kept));
            },
            {first_row, num_rounds, offsets, source_of_row, row_of_received, num_sent, num_received, round_ids, kept});
      }
    }
  }
}

}  // namespace
}  // namespace tessera
