#include "ep/placement.h"

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
    offsets[local] = static_cast<std::int32_t>(row);
  }
}

std::string describe_overload(std::string_view layer, std::int64_t rank, std::int64_t num_rows, double balanced_rows,
                              std::int64_t num_rows_needed, std::int64_t max_rows, double capacity_factor) {
  // The router treats NaN as 0 and takes the first of equal experts.
  const char* of_first =
      ". Tokens whose numbers are not finite all choose its experts: see whether the losses before were finite";
  return fmt::format(
      "{}: the experts of rank {} get {} rows, {:.3f} times the balanced load; with padding {} rows are needed, and "
      "there is room for {}. Make parallelism.expert_parallel_capacity_factor, now {}, larger, or 0 for any load{}",
      layer, rank, num_rows, static_cast<double>(num_rows) / balanced_rows, num_rows_needed, max_rows, capacity_factor,
      rank == 0 ? of_first : "");
}

std::string find_overload(const Tensor& counts_PE, const Placement& placement, const DispatchLayer& layer,
                          std::int64_t max_rows, double capacity_factor) {
  const std::int64_t num_ranks = counts_PE.dim(0), num_experts = counts_PE.dim(1), local = num_experts / num_ranks;
  const auto* counts = counts_PE.data<std::int32_t>();
  // Rows of the ranks in [begin, end), without padding.
  const auto rows_of = [&](std::int64_t begin, std::int64_t end) {
    std::int64_t rows = 0;
    for (std::int64_t source = 0; source < num_ranks; ++source) {
      for (std::int64_t x = begin * local; x < end * local; ++x) rows += counts[source * num_experts + x];
    }
    return rows;
  };
  for (std::int64_t rank = 0; rank < num_ranks; ++rank) {
    const std::int64_t needed = placement.offsets_Pe1.data<std::int32_t>()[rank * (local + 1) + local];
    if (needed <= max_rows) continue;
    const double balanced = static_cast<double>(rows_of(0, num_ranks)) / static_cast<double>(num_ranks);
    const std::int64_t rows = rows_of(rank, rank + 1);
    return describe_overload(layer.name, rank, rows, balanced, needed, max_rows, capacity_factor);
  }
  return {};
}

}  // namespace tessera::ep
