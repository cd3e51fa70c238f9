// Computes where rows go from all ranks' counts. Every rank computes it for all ranks.
#pragma once

#include "ep/dispatcher.h"

namespace tessera::ep {

/// Says where rows go. Both tensors are int32.
struct Placement {
  Tensor first_row_PE;  // the first of the rows that source rank p sends to expert x, on x's rank
  Tensor offsets_Pe1;   // of rank p's experts, as in DispatchSaved
};

/// Allocates a placement from op's arena.
Placement allocate_placement(const Context& op, std::int64_t num_ranks, std::int64_t num_experts);

/// Fills `placement` from counts_PE (int32): the number of (token, k) pairs that source rank p has for each expert.
void place_rows(const Tensor& counts_PE, std::int64_t alignment, const Placement& placement);

/// Returns in how many rounds the rows of all ranks fit into `room` rows, which is a multiple of the alignment. It is 1
/// or more.
std::int64_t count_rounds(const Placement& placement, std::int64_t room);

/// Cuts the placement to one round: rows [round · room, (round + 1) · room) of every rank become rows [0, room).
/// Offsets are clamped to [0, room], but first rows are not. A pair has no row in this round if its row is below 0, or
/// is `room` or more. Groups keep their alignment, because `room` is a multiple of it.
void cut_to_round(const Placement& placement, std::int64_t round, std::int64_t room);

/// Holds a part of the rows that a source sends to an expert: [begin, end).
struct RowRange {
  std::int32_t begin, end;
  std::int32_t size() const { return end - begin; }
};

/// Returns those of `count` rows from first_row on that lie in [0, room).
RowRange rows_in_round(std::int32_t first_row, std::int32_t count, std::int64_t room);

}  // namespace tessera::ep
