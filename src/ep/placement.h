// Where rows go: a function of all ranks' counts, which every rank computes for all ranks.
#pragma once

#include <string>
#include <string_view>

#include "ep/dispatcher.h"

namespace tessera::ep {

/// int32 tensors.
struct Placement {
  Tensor first_row_PE;  // of the rows that source rank p sends to expert x: the first, on x's rank
  Tensor offsets_Pe1;   // of rank p's experts, as in DispatchSaved
};

/// From op's arena.
Placement allocate_placement(const Context& op, std::int64_t num_ranks, std::int64_t num_experts);

/// `placement` (=) from counts_PE (int32): source rank p's (token, k) pairs per expert.
void place_rows(const Tensor& counts_PE, std::int64_t alignment, const Placement& placement);

/// What to say of a rank that gets num_rows rows, for which, with padding, num_rows_needed are needed, and there is
/// room for max_rows. balanced_rows: of a balanced load.
std::string describe_overload(std::string_view layer, std::int64_t rank, std::int64_t num_rows, double balanced_rows,
                              std::int64_t num_rows_needed, std::int64_t max_rows, double capacity_factor);

/// What to say if a rank gets more than max_rows rows, padding included; empty if none does. The same on all ranks.
std::string find_overload(const Tensor& counts_PE, const Placement& placement, const DispatchLayer& layer,
                          std::int64_t max_rows, double capacity_factor);

}  // namespace tessera::ep
