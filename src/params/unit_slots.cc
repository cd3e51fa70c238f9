#include "params/unit_slots.h"

#include <algorithm>
#include <utility>

#include "ops/elementwise/elementwise.h"

namespace tessera {
namespace {

std::size_t bytes_of(std::int64_t count, DType dtype) { return static_cast<std::size_t>(count) * size_of(dtype); }

/// Returns the slot of a unit, or null.
template <typename Slots>
auto find(Slots& slots, UnitId unit) {
  const auto found = std::find_if(slots.begin(), slots.end(), [&](const auto& slot) { return slot.unit == unit; });
  return found == slots.end() ? nullptr : &*found;
}

}  // namespace

std::size_t UnitSlots::num_bytes(DType compute) const {
  return num_weight_slots() * bytes_of(table_->slot_size(), compute) +
         num_gradient_slots() * bytes_of(table_->slot_size(), DType::kFloat32);
}

void UnitSlots::allocate(const Context& op, const Tensor& weights, const Tensor& gradients) {
  op_ = op;
  weights_ = weights;
  gradients_ = gradients;
  is_allocated_ = true;
  if (table_->slot_size() == 0) return;
  make_slots();
  gathered_ = Buffer(slots_.size() * bytes_of(table_->slot_size(), weights.dtype()), op.target());
  summed_ = Buffer(gradient_slots_.size() * bytes_of(table_->slot_size(), DType::kFloat32), op.target());
}

void UnitSlots::allocate_meta(DType compute) {
  weights_ = Tensor(nullptr, {table_->flat_size()}, compute, Device::kMeta);
  gradients_ = Tensor(nullptr, {table_->flat_size()}, DType::kFloat32, Device::kMeta);
  if (table_->slot_size() > 0) make_slots();
}

void UnitSlots::make_slots() {
  slots_.clear();
  gradient_slots_.clear();
  slots_.resize(num_weight_slots());
  gradient_slots_.resize(num_gradient_slots());
}

Tensor UnitSlots::in_slot(const Buffer& buffer, DType dtype, std::size_t slot, std::int64_t offset, Shape shape) const {
  std::byte* data = buffer.data();
  if (data != nullptr) data += bytes_of(static_cast<std::int64_t>(slot) * table_->slot_size() + offset, dtype);
  return Tensor(data, shape, dtype, is_allocated_ ? weights_.device() : Device::kMeta);
}

Tensor UnitSlots::local_in_slot(const Buffer& buffer, DType dtype, std::size_t slot, ParamId id) const {
  const ParameterTable::Placement& place = table_->place(id);
  return in_slot(buffer, dtype, slot, table_->bucket(id).slot_offset + place.offset, place.local);
}

Tensor UnitSlots::weight(ParamId id, DType compute) const {
  return local_in_slot(gathered_, compute, is_allocated_ ? slot(table_->place(id).unit) : 0, id);
}

Tensor UnitSlots::gradient(ParamId id) const {
  if (!is_allocated_) return local_in_slot(summed_, DType::kFloat32, 0, id);
  const Slot* slot = find(gradient_slots_, table_->place(id).unit);
  TESSERA_CHECK(slot != nullptr && slot->in_use, "{}", table_->spec(id).name);
  return local_in_slot(summed_, DType::kFloat32, static_cast<std::size_t>(slot - gradient_slots_.data()), id);
}

void UnitSlots::Slot::wait() {
  for (Work& one : work) one.wait();
  work.clear();
}

void UnitSlots::Slot::clear() {
  TESSERA_CHECK(!in_use);
  wait();
  unit.reset();
}

std::size_t UnitSlots::slot(UnitId unit) const {
  const Slot* slot = find(slots_, unit);
  TESSERA_CHECK(slot != nullptr && slot->in_use, "unit {}", unit);
  return static_cast<std::size_t>(slot - slots_.data());
}

void UnitSlots::start_gathering(UnitId unit, std::size_t slot) {
  slots_[slot].unit = unit;
  slots_[slot].fresh = true;
  for (const ParameterTable::Bucket& bucket : table_->buckets()) {
    if (bucket.unit != unit || !table_->sharded(bucket)) continue;
    const std::int64_t size = bucket.shard_size * table_->group(bucket).size();
    slots_[slot].work.push_back(
        table_->group(bucket).all_gather(weights_.rows(bucket.flat_offset, bucket.flat_offset + bucket.shard_size),
                                         in_slot(gathered_, weights_.dtype(), slot, bucket.slot_offset, {size}),
                                         fmt::format("the weights of unit {}", unit)));
  }
}

void UnitSlots::prefetch(UnitId unit) {
  if (!moves(unit) || find(slots_, unit) != nullptr) return;
  auto free = std::find_if(slots_.begin(), slots_.end(), [](const Slot& slot) { return !slot.unit; });
  if (free == slots_.end() && !options_.keep_gathered) {
    free =
        std::find_if(slots_.begin(), slots_.end(), [](const Slot& slot) { return !slot.in_use && slot.work.empty(); });
  }
  if (free != slots_.end()) start_gathering(unit, static_cast<std::size_t>(free - slots_.begin()));
}

bool UnitSlots::acquire(UnitId unit) {
  if (!moves(unit)) return false;
  prefetch(unit);
  Slot* slot = find(slots_, unit);
  TESSERA_CHECK(slot != nullptr, "no slot for unit {}", unit);
  slot->wait();
  slot->in_use = true;
  return std::exchange(slot->fresh, false);
}

void UnitSlots::release(UnitId unit) {
  if (!moves(unit)) return;
  slots_[slot(unit)].in_use = false;
}

void UnitSlots::forget_gathered() {
  for (Slot& slot : slots_) slot.clear();
}

void UnitSlots::acquire_gradients(UnitId unit, bool with_products, FirstWrites& first_writes) {
  if (!moves(unit)) return;
  // The slot of the same unit's last sum, so that its sums enter the shards one after the other; or one that is free.
  Slot* free = find(gradient_slots_, unit);
  if (options_.keep_gradients && free != nullptr) {
    TESSERA_CHECK(!free->in_use, "the gradients of unit {}", unit);
    free->in_use = true;
    return;
  }
  for (const bool empty : {true, false}) {
    for (Slot& slot : gradient_slots_) {
      if (free == nullptr && !slot.in_use && (!empty || !slot.unit)) free = &slot;
    }
  }
  TESSERA_CHECK(free != nullptr && !free->in_use, "no slot for the gradients of unit {}", unit);
  free->wait();
  free->unit = unit;
  free->in_use = true;
  std::int64_t used = 0;
  for (const ParameterTable::Bucket& bucket : table_->buckets()) {
    if (bucket.unit == unit && table_->sharded(bucket))
      used = bucket.slot_offset + table_->group(bucket).size() * bucket.shard_size;
  }
  const auto slot = static_cast<std::size_t>(free - gradient_slots_.data());
  if (!is_allocated_) return;
  const Tensor sums = in_slot(summed_, DType::kFloat32, slot, 0, {used});
  with_products ? first_writes.start(op_, sums, unit) : set_zero(op_, sums);
}

void UnitSlots::release_gradients(UnitId unit, const FirstWrites& first_writes) {
  if (!moves(unit)) return;
  Slot* slot = find(gradient_slots_, unit);
  TESSERA_CHECK(slot != nullptr && slot->in_use, "unit {}", unit);
  slot->in_use = false;
  if (!options_.keep_gradients) start_reducing(*slot, first_writes);
}

void UnitSlots::start_reducing(Slot& slot, const FirstWrites& first_writes) {
  if (is_allocated_) first_writes.require_assigned(slot.unit);
  for (const ParameterTable::Bucket& bucket : table_->buckets()) {
    if (bucket.unit != slot.unit || !table_->sharded(bucket)) continue;
    const std::int64_t size = bucket.shard_size * table_->group(bucket).size();
    slot.work.push_back(table_->group(bucket).reduce_scatter(
        in_slot(summed_, DType::kFloat32, static_cast<std::size_t>(&slot - gradient_slots_.data()), bucket.slot_offset,
                {size}),
        gradients_.rows(bucket.flat_offset, bucket.flat_offset + bucket.shard_size), Write::kAccumulate,
        fmt::format("the gradients of unit {}", bucket.unit)));
  }
}

void UnitSlots::finish_gradients(const FirstWrites& first_writes) {
  if (options_.keep_gradients) {
    for (UnitId unit = 0; unit < table_->num_units(); ++unit) {
      if (Slot* slot = find(gradient_slots_, unit)) start_reducing(*slot, first_writes);
    }
  }
  clear_gradients();
}

void UnitSlots::clear_gradients() {
  for (Slot& slot : gradient_slots_) slot.clear();
}

}  // namespace tessera
