// Computes where rows go from all ranks' counts. Every rank computes it for all ranks.
#pragma once

#include <string>
#include <string_view>

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

/// Describes the overload of a rank. The rank gets num_rows rows, needs room for num_rows_needed (padding included),
/// and has room for max_rows. balanced_rows is the number of rows of a balanced load.
std::string describe_overload(std::string_view layer, std::int64_t rank, std::int64_t num_rows, double balanced_rows,
                              std::int64_t num_rows_needed, std::int64_t max_rows, double capacity_factor);

/// Describes the first rank that gets more than max_rows rows, padding included. Returns an empty string if no rank
/// does. All ranks return the same.
std::string find_overload(const Tensor& counts_PE, const Placement& placement, const DispatchLayer& layer,
                          std::int64_t max_rows, double capacity_factor);

}  // namespace tessera::ep
