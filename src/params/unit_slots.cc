#include "params/unit_slots.h"

#include <algorithm>
#include <utility>

#include "ops/elementwise/elementwise.h"

namespace tessera {
namespace {

/// Returns the slot of a unit, or null.
template <typename Slots>
auto find(Slots& slots, UnitId unit) {
  const auto found = std::find_if(slots.begin(), slots.end(), [&](const auto& slot) { return slot.unit == unit; });
  return found == slots.end() ? nullptr : &*found;
}

}  // namespace

std::span<UnitSlots::Slot> UnitSlots::Slots::of(UnitId unit) {
  const SlotLayout::Range range = layout.slots_of(unit);
  return std::span(all).subspan(range.begin, range.end - range.begin);
}

SlotLayout UnitSlots::layout(bool per_unit, const SlotLayout::Counts& at_once) const {
  const std::vector<std::int64_t>& sizes = table_->unit_sizes();
  if (std::ranges::all_of(sizes, [](std::int64_t size) { return size == 0; })) return {};
  if (per_unit) return SlotLayout::per_unit(sizes.size());
  std::vector<SlotLayout::Unit> units;
  for (UnitId unit = 0; unit < sizes.size(); ++unit) units.push_back({sizes[unit], table_->is_of_vocabulary(unit)});
  return SlotLayout::shared(units, at_once);
}

std::size_t UnitSlots::num_bytes(DType compute) const {
  const std::vector<std::int64_t>& sizes = table_->unit_sizes();
  return size_in_bytes(weight_layout().begins(sizes).back(), compute) +
         size_in_bytes(gradient_layout().begins(sizes).back(), DType::kFloat32);
}

void UnitSlots::allocate(const Context& op, const Tensor& weights, const LeftOut& left_out, const Tensor& gradients) {
  op_ = op;
  weights_ = weights;
  left_out_ = left_out;
  gradients_ = gradients;
  is_allocated_ = true;
  make_slots(weight_slots_, weight_layout());
  make_slots(gradient_slots_, gradient_layout());
  weight_slots_.memory = Buffer(size_in_bytes(weight_slots_.begins.back(), weights.dtype()), op.target());
  gradient_slots_.memory = Buffer(size_in_bytes(gradient_slots_.begins.back(), DType::kFloat32), op.target());
}

void UnitSlots::allocate_meta(DType compute) {
  weights_ = Tensor(nullptr, {table_->flat_size()}, compute, Device::kMeta);
  gradients_ = Tensor(nullptr, {table_->flat_size()}, DType::kFloat32, Device::kMeta);
  make_slots(weight_slots_, weight_layout());
  make_slots(gradient_slots_, gradient_layout());
}

void UnitSlots::make_slots(Slots& slots, SlotLayout layout) const {
  slots.layout = std::move(layout);
  slots.begins = slots.layout.begins(table_->unit_sizes());
  slots.all.clear();
  slots.all.resize(slots.layout.num_slots());
}

Tensor UnitSlots::in_slot(const Slots& slots, DType dtype, std::size_t slot, std::int64_t offset, Shape shape) const {
  std::byte* data = slots.memory.data();
  if (data != nullptr) data += size_in_bytes(slots.begins[slot] + offset, dtype);
  return Tensor(data, shape, dtype, is_allocated_ ? weights_.device() : Device::kMeta);
}

Tensor UnitSlots::local_in_slot(const Slots& slots, DType dtype, std::size_t slot, ParamId id) const {
  const ParameterTable::Placement& place = table_->place(id);
  return in_slot(slots, dtype, slot, table_->bucket(id).slot_offset + place.offset, place.local);
}

Tensor UnitSlots::weight(ParamId id, DType compute) const {
  return local_in_slot(weight_slots_, compute, is_allocated_ ? slot(table_->place(id).unit) : 0, id);
}

Tensor UnitSlots::gradient(ParamId id) const {
  if (!is_allocated_) return local_in_slot(gradient_slots_, DType::kFloat32, 0, id);
  const Slot* slot = find(gradient_slots_.all, table_->place(id).unit);
  TESSERA_CHECK(slot != nullptr && slot->num_users > 0, "{}", table_->spec(id).name);
  return local_in_slot(gradient_slots_, DType::kFloat32, gradient_slots_.index(*slot), id);
}

void UnitSlots::Slot::wait() {
  for (Work& one : work) one.wait();
  work.clear();
}

void UnitSlots::Slot::clear() {
  TESSERA_CHECK(num_users == 0);
  wait();
  unit.reset();
  released = 0;
}

std::size_t UnitSlots::slot(UnitId unit) const {
  const Slot* slot = find(weight_slots_.all, unit);
  TESSERA_CHECK(slot != nullptr && slot->num_users > 0, "unit {}", unit);
  return weight_slots_.index(*slot);
}

void UnitSlots::start_gathering(UnitId unit, Slot& slot) {
  slot.unit = unit;
  slot.fresh = true;
  for (const ParameterTable::Bucket& bucket : table_->buckets()) {
    if (bucket.unit != unit || !table_->sharded(bucket)) continue;
    const std::int64_t size = bucket.shard_size * table_->group(bucket).size();
    const std::int64_t begin = left_out_.place(bucket.flat_offset);
    slot.work.push_back(table_->group(bucket).all_gather(
        weights_.rows(begin, begin + bucket.shard_size),
        in_slot(weight_slots_, weights_.dtype(), weight_slots_.index(slot), bucket.slot_offset, {size}),
        fmt::format("the weights of unit {}", unit)));
  }
}

void UnitSlots::prefetch(UnitId unit) {
  if (!moves(unit) || find(weight_slots_.all, unit) != nullptr) return;
  const std::span<Slot> slots = weight_slots_.of(unit);
  auto free = std::ranges::find_if(slots, [](const Slot& slot) { return !slot.unit; });
  if (free == slots.end()) {
    free = std::ranges::find_if(slots, [](const Slot& slot) { return slot.num_users == 0 && slot.work.empty(); });
  }
  if (free != slots.end()) start_gathering(unit, *free);
}

bool UnitSlots::acquire(UnitId unit) {
  if (!moves(unit)) return false;
  prefetch(unit);
  Slot* slot = find(weight_slots_.all, unit);
  TESSERA_CHECK(slot != nullptr, "no slot for unit {}", unit);
  slot->wait();
  ++slot->num_users;
  return std::exchange(slot->fresh, false);
}

void UnitSlots::release(UnitId unit) {
  if (!moves(unit)) return;
  --weight_slots_.all[slot(unit)].num_users;
}

void UnitSlots::forget_gathered() {
  for (Slot& slot : weight_slots_.all) slot.clear();
}

void UnitSlots::acquire_gradients(UnitId unit, bool with_products, FirstWrites& first_writes) {
  if (!moves(unit)) return;
  // If a slot still has the same unit's last sum, it is taken, so that the unit's sums enter the shards one by one.
  Slot* free = find(gradient_slots_.all, unit);
  if (options_.keep_gradients && free != nullptr) {
    TESSERA_CHECK(free->num_users == 0, "the gradients of unit {}", unit);
    free->num_users = 1;
    return;
  }
  if (free == nullptr) {
    // Otherwise the slot that was released first is taken, because its sum has had most time to end. `released` is 0
    // for an empty slot.
    for (Slot& slot : gradient_slots_.of(unit)) {
      if (slot.num_users == 0 && (free == nullptr || slot.released < free->released)) free = &slot;
    }
  }
  TESSERA_CHECK(free != nullptr && free->num_users == 0, "no slot for the gradients of unit {}", unit);
  free->wait();
  free->unit = unit;
  free->num_users = 1;
  std::int64_t used = 0;
  for (const ParameterTable::Bucket& bucket : table_->buckets()) {
    if (bucket.unit == unit && table_->sharded(bucket))
      used = bucket.slot_offset + table_->group(bucket).size() * bucket.shard_size;
  }
  if (!is_allocated_) return;
  const Tensor sums = in_slot(gradient_slots_, DType::kFloat32, gradient_slots_.index(*free), 0, {used});
  with_products ? first_writes.start(op_, sums, unit) : set_zero(op_, sums);
}

void UnitSlots::release_gradients(UnitId unit, const FirstWrites& first_writes) {
  if (!moves(unit)) return;
  Slot* slot = find(gradient_slots_.all, unit);
  TESSERA_CHECK(slot != nullptr && slot->num_users > 0, "unit {}", unit);
  slot->num_users = 0;
  slot->released = ++num_released_;
  if (!options_.keep_gradients) start_reducing(*slot, first_writes);
}

void UnitSlots::start_reducing(Slot& slot, const FirstWrites& first_writes) {
  if (is_allocated_) first_writes.require_assigned(slot.unit);
  for (const ParameterTable::Bucket& bucket : table_->buckets()) {
    if (bucket.unit != slot.unit || !table_->sharded(bucket)) continue;
    ProcessGroup& group = table_->group(bucket);
    const Tensor parts = in_slot(gradient_slots_, DType::kFloat32, gradient_slots_.index(slot), bucket.slot_offset,
                                 {bucket.shard_size * group.size()});
    const Tensor shard = gradients_.rows(bucket.flat_offset, bucket.flat_offset + bucket.shard_size);
    const std::string name = fmt::format("the gradients of unit {}", bucket.unit);
    slot.work.push_back(options_.reduce == DType::kBFloat16
                            ? group.reduce_scatter_as_bfloat16(parts, shard, Write::kAccumulate, name)
                            : group.reduce_scatter(parts, shard, Write::kAccumulate, name));
  }
}

void UnitSlots::finish_gradients(const FirstWrites& first_writes) {
  if (options_.keep_gradients) {
    for (UnitId unit = 0; unit < table_->num_units(); ++unit) {
      if (Slot* slot = find(gradient_slots_.all, unit)) start_reducing(*slot, first_writes);
    }
  }
  clear_gradients();
}

void UnitSlots::clear_gradients() {
  for (Slot& slot : gradient_slots_.all) slot.clear();
}

}  // namespace tessera
