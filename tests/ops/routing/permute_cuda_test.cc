#include "ops/routing/permute.h"
#include "tests/ops/parity.h"

namespace tessera {
namespace {

class PermuteCuda : public ParityTest {
 protected:
  struct Routing {
    Tensor ids_TK, counts_E;
  };

  /// Returns random experts. With `skew` > 0 the upper experts have no slots. Without `all_have` every third slot has
  /// no expert.
  Routing routing(std::int64_t tokens, std::int64_t top_k, std::int64_t experts, std::int64_t skew,
                  bool all_have = true) {
    const Philox philox(3, static_cast<std::uint32_t>(tokens + skew));
    std::vector<std::int32_t> ids, counts(static_cast<std::size_t>(experts), 0);
    for (std::int64_t slot = 0; slot < tokens * top_k; ++slot) {
      const auto drawn = static_cast<std::int64_t>(philox.words(static_cast<std::uint64_t>(slot))[0]);
      ids.push_back(static_cast<std::int32_t>(drawn % std::max<std::int64_t>(1, experts - skew)));
      ++counts[static_cast<std::size_t>(ids.back())];
    }
    for (std::size_t slot = 0; slot < ids.size() && !all_have; slot += 3) {
      --counts[static_cast<std::size_t>(ids[slot])];
      ids[slot] = kNoExpert;
    }
    return {ints(ids, {tokens, top_k}), ints(counts, {experts})};
  }
};

TEST_F(PermuteCuda, SortByExpert) {
  // The cases are a token; a block of slots and a tail; many blocks, all of one expert; and as many experts as there
  // may be.
  for (const auto& [tokens, top_k, experts, skew] : {std::tuple{1, 1, 1, 0},
                                                     {5, 2, 7, 3},
                                                     {700, 3, 8, 0},
                                                     {4099, 6, 64, 0},
                                                     {3000, 8, 256, 100},
                                                     {2500, 8, 300, 299},
                                                     {5000, 1, 1024, 0}}) {
    for (const auto& [alignment, all_have] :
         {std::pair<std::int64_t, bool>{1, true}, {16, true}, {128, true}, {1, false}, {16, false}}) {
      const ArenaScope scope(arena_);
      const Routing x = routing(tokens, top_k, experts, skew, all_have);
      const Tensor offsets = poisoned({experts + 1}, DType::kInt32);
      const Tensor slots = poisoned({max_rows(tokens * top_k, experts, alignment)}, DType::kInt32);
      const Tensor rows = poisoned({tokens, top_k}, DType::kInt32);
      expect_same(
          [&](const Side& side) {
            sort_by_expert(side.op, side(x.ids_TK), side(x.counts_E), alignment, side(offsets), side(slots),
                           side(rows));
          },
          {offsets, slots, rows});
    }
  }
}

TEST_F(PermuteCuda, RowsThereAndBack) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const std::int64_t dim : {1, 7, 8, 250, 2048, 7168}) {
      for (const std::int64_t top_k : {1, 6, 11}) {
        const ArenaScope scope(arena_);
        constexpr std::int64_t kTokens = 67, kExperts = 13, kAlignment = 16;
        const Routing x = routing(kTokens, top_k, kExperts, 2);
        const std::int64_t num_rows = max_rows(kTokens * top_k, kExperts, kAlignment);
        const Tensor offsets = ints(std::vector<std::int32_t>(kExperts + 1));
        const Tensor slots = ints(std::vector<std::int32_t>(static_cast<std::size_t>(num_rows)));
        const Tensor rows =
            ints(std::vector<std::int32_t>(kTokens * static_cast<std::size_t>(top_k)), {kTokens, top_k});
        sort_by_expert(context(), x.ids_TK, x.counts_E, kAlignment, offsets, slots, rows);
        const Tensor tokens = random({kTokens, dim}, dtype), gathered = poisoned({num_rows, dim}, dtype);
        const Tensor used = ints({offsets.data<std::int32_t>()[kExperts]});
        expect_same(
            [&](const Side& side) {
              gather_rows(side.op, side(tokens), side(slots), top_k, side(used), side(gathered));
            },
            {gathered});
        const Tensor weights = random({kTokens, top_k}), out = random({num_rows, dim}, dtype);
        for (const Write write : {Write::kAssign, Write::kAccumulate}) {
          for (const Tensor& factors : {weights, Tensor()}) {
            const ArenaScope results(arena_);
            const Tensor y = write == Write::kAssign ? poisoned({kTokens, dim}, dtype) : random({kTokens, dim}, dtype);
            expect_same(
                [&](const Side& side) { combine_rows(side.op, side(out), side(rows), side(factors), side(y), write); },
                {y});
            constexpr std::int64_t kExpertsPerRank = 4;
            const Tensor sums =
                write == Write::kAssign ? poisoned({kTokens, dim}, dtype) : random({kTokens, dim}, dtype);
            expect_same(
                [&](const Side& side) {
                  combine_rows_by_rank(side.op, side(out), side(rows), side(factors), side(x.ids_TK), kExpertsPerRank,
                                       side(sums), write);
                },
                {sums});
          }
        }
      }
    }
  }
}

TEST_F(PermuteCuda, RowsOfBytes) {
  for (const auto& [dtype, dim] : {std::pair{DType::kFloat8E4M3, 2048},
                                   {DType::kFloat8E8M0, 64},
                                   {DType::kFloat8E8M0, 5},
                                   {DType::kBFloat16, 7},
                                   {DType::kFloat32, 12}}) {
    for (const std::int64_t divisor : {1, 3}) {
      const ArenaScope scope(arena_);
      constexpr std::int64_t kRows = 41, kOut = 130;
      const Tensor x = arena_.allocate({kRows, dim}, dtype);
      for (std::size_t i = 0; i < x.num_bytes(); ++i)
        static_cast<std::uint8_t*>(x.raw())[i] = static_cast<std::uint8_t>(i * 7);
      std::vector<std::int32_t> sources;
      for (std::int32_t r = 0; r < kOut; ++r) {
        sources.push_back(r % 9 == 4 ? -1 : static_cast<std::int32_t>(r * 17 % (kRows * divisor)));
      }
      const Tensor source = ints(sources), y = poisoned({kOut, dim}, dtype);
      expect_same([&](const Side& side) { gather_row_bytes(side.op, side(x), side(source), divisor, side(y)); }, {y});
    }
  }
}

TEST_F(PermuteCuda, GatheredRowsInQuantizedForm) {
  const mx::Format square = {.along = mx::kBlock, .across = mx::kBlock};
  for (const mx::Format& format : {mx::Format{}, square}) {
    for (const std::int64_t dim : {64, 2048}) {
      for (const bool plain : {true, false}) {
        const ArenaScope scope(arena_);
        constexpr std::int64_t kTokens = 96, kTopK = 3, kRows = 320;
        std::vector<std::int32_t> slots;
        for (std::int32_t r = 0; r < kRows; ++r) slots.push_back(r % 10 == 9 ? -1 : r * 7 % (kTokens * kTopK));
        const Tensor slot_of_row = ints(slots), num_rows = ints({kRows});
        const Tensor x = random({kTokens, dim}, DType::kBFloat16, 3.0);
        GemmOperand y;
        if (plain) y.plain = poisoned({kRows, dim}, DType::kBFloat16);
        y.rows = poisoned({kRows, dim}, format);
        y.columns = poisoned({dim, kRows}, format);
        std::vector<Tensor> outputs = {y.rows.elements, y.rows.scales, y.columns.elements, y.columns.scales};
        if (plain) outputs.push_back(y.plain);
        expect_same(
            [&](const Side& side) { gather_rows(side.op, side(x), side(slot_of_row), kTopK, side(num_rows), side(y)); },
            outputs);
      }
    }
  }
}

TEST_F(PermuteCuda, GatherNumbers) {
  const Tensor x = random({1000}), y = poisoned({70'001}, DType::kFloat32);
  std::vector<std::int32_t> indices;
  for (std::int32_t i = 0; i < 70'001; ++i) indices.push_back(i % 7 == 3 ? -1 : i * 13 % 1000);
  const Tensor index = ints(indices);
  expect_same([&](const Side& side) { gather_numbers(side.op, side(x), side(index), side(y)); }, {y});
}

}  // namespace
}  // namespace tessera
