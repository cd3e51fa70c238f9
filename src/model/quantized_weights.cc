#include "model/quantized_weights.h"

#include <algorithm>

#include "ops/quantize.h"

namespace tessera {

QuantizedWeights::QuantizedWeights(const Parameters& parameters, PrecisionTable table, Device target)
    : parameters_(&parameters), table_(std::move(table)), target_(target), places_(table_.size()) {
  TESSERA_CHECK(table_.empty() || table_.size() == parameters.size(), "{} {}", table_.size(), parameters.size());
  std::vector<std::size_t> unit_bytes(parameters.num_units());
  for (ParamId id = 0; id < table_.size(); ++id) {
    if (!table_[id].quantizes_weight()) continue;
    std::size_t& used = parameters.sharded(id) ? unit_bytes[parameters.unit(id)] : slots_begin_;
    const auto take = [&](const Shape& shape, DType dtype) {
      const std::size_t at = used;
      const std::size_t bytes = static_cast<std::size_t>(shape.num_elements()) * size_of(dtype);
      const std::size_t alignment = alignment_on(target_);
      used += (bytes + alignment - 1) / alignment * alignment;
      return at;
    };
    const Shape& shape = parameters.local_shape(id);
    const mx::Format& format = table_[id].weight;
    Place& place = places_[id];
    place.row_elements = take(shape, DType::kFloat8E4M3);
    place.row_scales = take(mx::scales_shape(shape, format), mx::scales_dtype(format));
    if (has_columns(format)) {
      place.column_elements = take(shape, DType::kFloat8E4M3);
      place.column_scales = take(mx::scales_shape(mx::transposed(shape), format), mx::scales_dtype(format));
    }
  }
  for (const std::size_t bytes : unit_bytes) slot_bytes_ = std::max(slot_bytes_, bytes);
  num_bytes_ = slots_begin_ + parameters.num_slots() * slot_bytes_;
}

const SitePrecision& QuantizedWeights::precision(ParamId id) const {
  static const SitePrecision kNone;
  return table_.empty() ? kNone : table_[id];
}

QuantizedWeight QuantizedWeights::weight(ParamId id) const {
  TESSERA_CHECK(precision(id).quantizes_weight());
  const bool meta = buffer_.data() == nullptr;
  const std::size_t base =
      meta || !parameters_->sharded(id) ? 0 : slots_begin_ + parameters_->slot(parameters_->unit(id)) * slot_bytes_;
  const auto view = [&](const Shape& shape, const mx::Format& format, std::size_t elements, std::size_t scales) {
    const auto at = [&](std::size_t offset) { return meta ? nullptr : buffer_.data() + base + offset; };
    const Device device = meta ? Device::kMeta : target_;
    return mx::Quantized{Tensor(at(elements), shape, DType::kFloat8E4M3, device),
                         Tensor(at(scales), mx::scales_shape(shape, format), mx::scales_dtype(format), device), format};
  };
  const Place& place = places_[id];
  const mx::Format& format = table_[id].weight;
  const Shape& shape = parameters_->local_shape(id);
  QuantizedWeight weight{.rows = view(shape, format, place.row_elements, place.row_scales), .columns = {}};
  if (has_columns(format)) {
    weight.columns = view(mx::transposed(shape), format, place.column_elements, place.column_scales);
  }
  return weight;
}

void QuantizedWeights::allocate() { buffer_ = Buffer(num_bytes_, target_); }

void QuantizedWeights::refresh_one(const Context& op, ParamId id) {
  const QuantizedWeight quantized = weight(id);
  quantize(op, parameters_->weight(id), quantized.rows, quantized.columns);
}

void QuantizedWeights::refresh(const Context& op) {
  const TraceScope trace(op.trace, "quantize_weights");
  for (ParamId id = 0; id < table_.size(); ++id) {
    if (table_[id].quantizes_weight() && !parameters_->sharded(id)) refresh_one(op, id);
  }
}

void QuantizedWeights::refresh(const Context& op, UnitId unit) {
  const TraceScope trace(op.trace, "quantize_weights");
  for (ParamId id = 0; id < table_.size(); ++id) {
    if (table_[id].quantizes_weight() && parameters_->sharded(id) && parameters_->unit(id) == unit) refresh_one(op, id);
  }
}

}  // namespace tessera
