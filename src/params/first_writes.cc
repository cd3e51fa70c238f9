#include "params/first_writes.h"

#include <algorithm>

#include "ops/elementwise/elementwise.h"

namespace tessera {

bool FirstWrites::is_assigned_in(std::optional<UnitId> unit, ParamId id) const {
  if (table_->spec(id).gemm == GemmKind::kNone) return false;
  return unit ? table_->sharded(id) && table_->place(id).unit == *unit : !table_->sharded(id);
}

void FirstWrites::start(const Context& op, const Tensor& sums, std::optional<UnitId> unit) {
  using Range = ParameterTable::Range;
  std::vector<Range> assigned;
  for (ParamId id = 0; id < table_->size(); ++id) {
    if (!is_assigned_in(unit, id)) continue;
    to_assign_[id] = true;
    const ParameterTable::Bucket& bucket = table_->bucket(id);
    const std::int64_t begin = (unit ? bucket.slot_offset : bucket.flat_offset) + table_->place(id).offset;
    assigned.push_back({begin, begin + table_->place(id).local.num_elements()});
  }
  std::ranges::sort(assigned, {}, &Range::begin);
  assigned.push_back({sums.dim(0), sums.dim(0)});
  std::int64_t end = 0;  // of the range before
  for (const Range& range : assigned) {
    if (range.begin > end) set_zero(op, sums.rows(end, range.begin));
    end = range.end;
  }
}

Write FirstWrites::next(ParamId id) {
  if (!to_assign_[id]) return Write::kAccumulate;
  to_assign_[id] = false;
  return Write::kAssign;
}

void FirstWrites::require_assigned(std::optional<UnitId> unit) const {
  for (ParamId id = 0; id < table_->size(); ++id) {
    TESSERA_CHECK(!is_assigned_in(unit, id) || !to_assign_[id], "no product has assigned the gradient of {}",
                  table_->spec(id).name);
  }
}

}  // namespace tessera
