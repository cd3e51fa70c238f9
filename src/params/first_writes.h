// Keeps track of which gradients the next product assigns. The first product of a step assigns the gradient of a GEMM's
// weight instead of adding to zeros. So the gradient need not be cleared.
#pragma once

#include <optional>
#include <vector>

#include "ops/runtime/context.h"
#include "params/parameter_table.h"

namespace tessera {

class FirstWrites {
 public:
  explicit FirstWrites(const ParameterTable& table) : table_(&table) {}

  /// Forgets all marks.
  void reset() { to_assign_.assign(table_->size(), false); }
  /// Starts the sums of a unit in its slot. Without a unit, starts those in the flat buffer. It marks the gradients
  /// that the next product assigns, and sets all others to 0.
  void start(const Context& op, const Tensor& sums, std::optional<UnitId> unit);
  /// Returns how the next product writes to the gradient of a GEMM's weight. Must be called once per product.
  Write next(ParamId id);
  /// Throws InternalError if a marked gradient of this unit has not been assigned. Without a unit, checks those of the
  /// flat buffer.
  void require_assigned(std::optional<UnitId> unit) const;

 private:
  bool is_assigned_in(std::optional<UnitId> unit, ParamId id) const;

  const ParameterTable* table_;
  std::vector<bool> to_assign_;  // by id; true while no product of this step has written to the gradient
};

}  // namespace tessera
