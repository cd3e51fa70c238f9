#include "ep/placement.h"

#include <algorithm>
#include <limits>

#include "ops/kit/checks.h"

namespace tessera::ep {

Placement allocate_placement(const Context& op, std::int64_t num_ranks, std::int64_t num_experts) {
  return {.first_row_PE = op.arena->allocate({num_ranks, num_experts}, DType::kInt32),
          .offsets_Pe1 = op.arena->allocate({num_ranks, num_experts / num_ranks + 1}, DType::kInt32)};
}

void place_rows(const Tensor& counts_PE, std::int64_t alignment, const Placement& placement) {
  const std::int64_t num_ranks = counts_PE.dim(0), num_experts = counts_PE.dim(1), local = num_experts / num_ranks;
  TESSERA_CHECK_TENSOR(counts_PE, DType::kInt32, {num_ranks, num_experts});
  const auto* counts = counts_PE.data<std::int32_t>();
  auto* first_rows = placement.first_row_PE.data<std::int32_t>();
  for (std::int64_t rank = 0; rank < num_ranks; ++rank) {
    auto* offsets = placement.offsets_Pe1.data<std::int32_t>() + rank * (local + 1);
    std::int64_t row = 0;
    for (std::int64_t i = 0; i < local; ++i) {
      offsets[i] = static_cast<std::int32_t>(row);
      for (std::int64_t source = 0; source < num_ranks; ++source) {
        const std::int64_t at = source * num_experts + rank * local + i;
        TESSERA_CHECK(counts[at] >= 0, "rank {} sends {} rows to expert {}", source, counts[at], rank * local + i);
        first_rows[at] = static_cast<std::int32_t>(row);
        row += counts[at];
      }
      row = (row + alignment - 1) / alignment * alignment;
    }
    TESSERA_CHECK(row <= std::numeric_limits<std::int32_t>::max(), "rank {} gets {} rows", rank, row);
    offsets[local] = static_cast<std::int32_t>(row);
  }
}

std::int64_t count_rounds(const Placement& placement, std::int64_t room) {
  const std::int64_t ranks = placement.offsets_Pe1.dim(0), local = placement.offsets_Pe1.dim(1) - 1;
  const auto* offsets = placement.offsets_Pe1.data<std::int32_t>();
  std::int64_t most = 1;
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    most = std::max(most, (offsets[rank * (local + 1) + local] + room - 1) / room);
  }
  return most;
}

void cut_to_round(const Placement& placement, std::int64_t round, std::int64_t room) {
  const auto begin = static_cast<std::int32_t>(round * room), size = static_cast<std::int32_t>(room);
  auto* first_rows = placement.first_row_PE.data<std::int32_t>();
  for (std::int64_t i = 0; i < placement.first_row_PE.num_elements(); ++i) first_rows[i] -= begin;
  auto* offsets = placement.offsets_Pe1.data<std::int32_t>();
  for (std::int64_t i = 0; i < placement.offsets_Pe1.num_elements(); ++i) {
    offsets[i] = std::clamp(offsets[i] - begin, 0, size);
  }
}

RowRange rows_in_round(std::int32_t first_row, std::int32_t count, std::int64_t room) {
  const auto size = static_cast<std::int32_t>(room);
  return {std::clamp(first_row, 0, size), std::clamp(first_row + count, 0, size)};
}

}  // namespace tessera::ep
