#include <algorithm>
#include <vector>

#include "ep/exchange_plan.h"
#include "ep/placement.h"
#include "ops/routing/permute.h"

namespace tessera::cpu {
namespace {

std::span<std::int32_t> numbers(const Tensor& x) {
  return {x.data<std::int32_t>(), static_cast<std::size_t>(x.num_elements())};
}

std::span<std::int32_t> row(const Tensor& x_NE, std::int64_t i) { return numbers(x_NE[i]); }

}  // namespace

void place_round(const Context& context, const Tensor& counts_PE, std::int64_t alignment, std::int64_t round,
                 std::int64_t room, const Tensor& first_row_PE, const Tensor& num_rounds_1) {
  const std::int64_t num_ranks = counts_PE.dim(0), local = counts_PE.dim(1) / num_ranks;
  const ArenaScope scope(*context.arena);
  const ep::Placement placement{.first_row_PE = first_row_PE,
                                .offsets_Pe1 = context.arena->allocate({num_ranks, local + 1}, DType::kInt32)};
  if (context.measuring()) return;
  ep::place_rows(counts_PE, alignment, placement);
  num_rounds_1.data<std::int32_t>()[0] = static_cast<std::int32_t>(ep::count_rounds(placement, room));
  ep::cut_to_round(placement, round, room);
}

void keep_round(const Context& context, const Tensor& expert_ids_TK, const Tensor& counts_E, const Tensor& first_row_E,
                std::int64_t room, const Tensor& round_ids_TK, const Tensor& kept_E) {
  if (context.measuring()) return;
  const std::int64_t num_experts = counts_E.dim(0);
  const std::span<std::int32_t> first_row = numbers(first_row_E), kept = numbers(kept_E);
  std::vector<std::int32_t> next_row(first_row.begin(), first_row.end());
  std::ranges::fill(kept, 0);
  for (std::int64_t slot = 0; slot < expert_ids_TK.num_elements(); ++slot) {
    const std::int32_t expert = expert_ids_TK.data<std::int32_t>()[slot];
    TESSERA_CHECK(expert == kNoExpert || (0 <= expert && expert < num_experts), "slot {}: expert {} of {}", slot,
                  expert, num_experts);
    const auto at = static_cast<std::size_t>(expert);
    const bool stays = expert != kNoExpert && ep::rows_in_round(next_row[at]++, 1, room).size() == 1;
    if (stays) ++kept[at];
    round_ids_TK.data<std::int32_t>()[slot] = stays ? expert : kNoExpert;
  }
  for (std::size_t x = 0; x < next_row.size(); ++x) {
    const std::int32_t found = next_row[x] - first_row[x];
    TESSERA_CHECK(found == numbers(counts_E)[x], "expert {} has {} slots, counted {}", x, found, numbers(counts_E)[x]);
  }
}

void plan_exchange(const Context& context, const Tensor& counts_PE, const Tensor& first_row_PE, std::int64_t rank,
                   std::int64_t alignment, const Tensor& offsets_e1, const Tensor& source_of_row_R,
                   const Tensor& row_of_received_R, const Tensor& num_sent_P, const Tensor& num_received_P) {
  if (context.measuring()) return;
  const std::int64_t num_ranks = counts_PE.dim(0), local = offsets_e1.dim(0) - 1, room = source_of_row_R.dim(0);
  const auto rows_of = [&](std::int64_t source, std::int64_t expert) {
    const auto at = static_cast<std::size_t>(expert);
    return ep::rows_in_round(row(first_row_PE, source)[at], row(counts_PE, source)[at], room);
  };
  const std::int64_t first_expert = rank * local;
  const std::span<std::int32_t> sources = numbers(source_of_row_R), rows = numbers(row_of_received_R);
  std::ranges::fill(sources, -1);
  std::ranges::fill(rows, -1);
  std::int32_t num_received = 0;
  for (std::int64_t peer = 0; peer < num_ranks; ++peer) {
    const std::int32_t before = num_received;
    for (std::int64_t x = first_expert; x < first_expert + local; ++x) {
      const ep::RowRange theirs = rows_of(peer, x);
      for (std::int32_t r = theirs.begin; r < theirs.end; ++r) {
        sources[static_cast<std::size_t>(r)] = num_received;
        rows[static_cast<std::size_t>(num_received++)] = r;
      }
    }
    numbers(num_received_P)[static_cast<std::size_t>(peer)] = num_received - before;
    std::int32_t num_sent = 0;
    for (std::int64_t x = peer * local; x < (peer + 1) * local; ++x) num_sent += rows_of(rank, x).size();
    numbers(num_sent_P)[static_cast<std::size_t>(peer)] = num_sent;
  }
  // A group begins with the rows of rank 0. The last one ends with those of the last rank, and padding.
  const auto clamped = [&](std::int64_t begin) {
    return static_cast<std::int32_t>(std::clamp<std::int64_t>(begin, 0, room));
  };
  const std::span<std::int32_t> offsets = numbers(offsets_e1);
  for (std::int64_t i = 0; i < local; ++i) {
    offsets[static_cast<std::size_t>(i)] = clamped(row(first_row_PE, 0)[static_cast<std::size_t>(first_expert + i)]);
  }
  const auto last = static_cast<std::size_t>(first_expert + local - 1);
  const std::int64_t end = clamped(row(first_row_PE, num_ranks - 1)[last] + row(counts_PE, num_ranks - 1)[last]);
  offsets.back() = clamped((end + alignment - 1) / alignment * alignment);
}

}  // namespace tessera::cpu
