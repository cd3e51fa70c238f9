// What the dispatchers that a host drives by collectives have in common: numbers on the host, and where rows go by all
// ranks' counts.
#pragma once

#include <span>
#include <vector>

#include "ep/dispatcher.h"

namespace tessera::ep {

using Ints = std::vector<std::int32_t>;

/// A view of `numbers`, which must stay.
Tensor tensor_of(Ints& numbers, const Shape& shape);
/// The numbers of x (int32), wherever x is; a GPU's are waited for.
Ints fetch(const Context& op, const Tensor& x);
/// The first of x (int32), wherever x is, = numbers.
void put(const Context& op, std::span<const std::int32_t> numbers, const Tensor& x);

/// Placement (ep/placement.h), and what it comes from.
struct HostPlacement {
  Ints counts_PE, first_row_PE, offsets_Pe1;
};
/// Gathers all ranks' counts and places their rows. All ranks must call it together. Throws Error, on all ranks, if a
/// rank gets more rows than it has room for.
HostPlacement gather_placement(const Context& op, ProcessGroup& group, const DispatchSaved& saved,
                               double capacity_factor);

}  // namespace tessera::ep
