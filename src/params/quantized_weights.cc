#include "params/quantized_weights.h"

#include <algorithm>

#include "ops/gemm/quantized_gemm.h"
#include "ops/optimizer/quantize_master.h"
#include "ops/quantize/quantize.h"

namespace tessera {

QuantizedWeights::QuantizedWeights(const Context& op, const Parameters& parameters, PrecisionTable table, bool keep,
                                   std::size_t num_passes)
    : parameters_(&parameters), table_(std::move(table)), keep_(keep), target_(op.target()), places_(table_.size()) {
  TESSERA_CHECK(table_.empty() || table_.size() == parameters.size(), "{} {}", table_.size(), parameters.size());
  unit_bytes_.resize(parameters.num_units());
  for (ParamId id = 0; id < table_.size(); ++id) {
    TESSERA_CHECK((table_[id].fprop == Precision::kHigh) == (table_[id].dgrad == Precision::kHigh), "{}",
                  parameters.spec(id).name);
    if (!table_[id].quantizes_weight()) continue;
    std::int64_t& used = is_in_slot(id) ? unit_bytes_[parameters.unit(id)] : slots_begin_;
    places_[id] = {.form = weight_form(op, parameters.local_shape(id), table_[id].weight, parameters.compute_dtype()),
                   .begin = used};
    view(id, nullptr, used);
  }
  if (keep) {
    slot_begins_ = parameters.slot_begins(unit_bytes_);
    return;
  }
  std::vector<SlotLayout::Unit> units;
  for (UnitId unit = 0; unit < unit_bytes_.size(); ++unit) {
    units.push_back({unit_bytes_[unit], parameters.is_of_vocabulary(unit)});
  }
  layout_ = SlotLayout::shared(units, {.layers = num_passes, .vocabulary = 1, .together = num_passes + 1});
  slot_begins_ = layout_.begins(unit_bytes_);
  slots_.resize(layout_.num_slots());
}

QuantizedWeight QuantizedWeights::view(ParamId id, std::byte* memory, std::int64_t& at) const {
  return allocate_weight(
      places_[id].form, parameters_->local_shape(id), table_[id].weight, [&](const Shape& shape, DType dtype) {
        const Tensor tensor(memory == nullptr ? nullptr : memory + at, shape, dtype,
                            memory == nullptr ? Device::kMeta : target_);
        const std::size_t alignment = alignment_on(target_);
        at += static_cast<std::int64_t>((tensor.num_bytes() + alignment - 1) / alignment * alignment);
        return tensor;
      });
}

const SitePrecision& QuantizedWeights::precision(ParamId id) const {
  static const SitePrecision kNone;
  return table_.empty() ? kNone : table_[id];
}

QuantizedWeight QuantizedWeights::weight(ParamId id) const {
  TESSERA_CHECK(precision(id).quantizes_weight());
  const bool meta = buffer_.data() == nullptr;
  std::int64_t at = places_[id].begin;
  if (!meta && is_in_slot(id)) at += slots_begin_ + slot_begins_[slot_of(parameters_->unit(id))];
  return view(id, buffer_.data(), at);
}

void QuantizedWeights::allocate() { buffer_ = Buffer(num_bytes(), target_); }

std::size_t QuantizedWeights::slot_of(UnitId unit) const {
  if (keep_) return parameters_->slot(unit);
  const auto found = std::ranges::find(slots_, unit, &Slot::unit);
  TESSERA_CHECK(found != slots_.end(), "unit {}", unit);
  return static_cast<std::size_t>(found - slots_.begin());
}

template <typename Which>
std::vector<ParamId> QuantizedWeights::weights_where(Which&& which) const {
  std::vector<ParamId> ids;
  for (ParamId id = 0; id < table_.size(); ++id) {
    if (table_[id].quantizes_weight() && which(id)) ids.push_back(id);
  }
  return ids;
}

void QuantizedWeights::quantize_all(const Context& op, std::span<const ParamId> ids) const {
  const TraceScope trace(op.trace, "quantize_weights");
  for (const ParamId id : ids) {
    if (parameters_->has_copy(id)) {
      quantize_weight(op, parameters_->weight(id), table_[id].weight, weight(id));
    } else {
      quantize_master(op, parameters_->master(id), parameters_->compute_dtype(), table_[id].weight, weight(id));
    }
  }
}

std::vector<ParamId> QuantizedWeights::kept() const {
  return weights_where([&](ParamId id) { return !is_in_slot(id); });
}

void QuantizedWeights::refresh(const Context& op) const {
  if (op.measuring()) return;
  const auto quantize_in = [&](Arena& arena) {
    Context own = op;
    own.arena = &arena;
    quantize_all(own, kept());
  };
  Arena measuring(target_);
  quantize_in(measuring);
  Arena scratch(measuring.peak(), target_);
  quantize_in(scratch);
}

void QuantizedWeights::forget() {
  for (Slot& slot : slots_) slot.unit.reset();
}

void QuantizedWeights::begin_unit(const Context& op, UnitId unit, bool is_new) {
  if (!keep_) {
    if (unit_bytes_[unit] == 0) return;
    auto slot = std::ranges::find(slots_, unit, &Slot::unit);
    is_new = slot == slots_.end();
    if (is_new) {
      const auto [begin, end] = layout_.slots_of(unit);
      const std::span<Slot> usable = std::span(slots_).subspan(begin, end - begin);
      const auto oldest =
          std::ranges::min_element(usable, {}, [](const Slot& one) { return std::pair(one.num_users, one.last_use); });
      slot = slots_.begin() + static_cast<std::ptrdiff_t>(begin) + (oldest - usable.begin());
      TESSERA_CHECK(slot->num_users == 0, "no slot for unit {}", unit);
      slot->unit = unit;
    }
    ++slot->num_users;
    slot->last_use = ++num_uses_;
  }
  if (!is_new) return;
  quantize_all(op, weights_where([&](ParamId id) { return is_in_slot(id) && parameters_->unit(id) == unit; }));
}

void QuantizedWeights::end_unit(UnitId unit) {
  if (keep_ || unit_bytes_[unit] == 0) return;
  --slots_[slot_of(unit)].num_users;
}

}  // namespace tessera
