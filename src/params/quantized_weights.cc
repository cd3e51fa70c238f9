#include "params/quantized_weights.h"

#include <algorithm>

#include "ops/gemm/quantized_gemm.h"
#include "ops/quantize/quantize.h"

namespace tessera {

QuantizedWeights::QuantizedWeights(const Context& op, const Parameters& parameters, PrecisionTable table)
    : parameters_(&parameters), table_(std::move(table)), target_(op.target()), places_(table_.size()) {
  TESSERA_CHECK(table_.empty() || table_.size() == parameters.size(), "{} {}", table_.size(), parameters.size());
  std::vector<std::size_t> unit_bytes(parameters.num_units());
  for (ParamId id = 0; id < table_.size(); ++id) {
    if (!table_[id].quantizes_weight()) continue;
    std::size_t& used = parameters.sharded(id) ? unit_bytes[parameters.unit(id)] : slots_begin_;
    places_[id] = {.form = weight_form(op, parameters.local_shape(id), table_[id].weight, parameters.compute_dtype()),
                   .begin = used};
    view(id, nullptr, used);
  }
  for (const std::size_t bytes : unit_bytes) slot_bytes_ = std::max(slot_bytes_, bytes);
  num_bytes_ = slots_begin_ + parameters.num_slots() * slot_bytes_;
}

QuantizedWeight QuantizedWeights::view(ParamId id, std::byte* memory, std::size_t& at) const {
  return allocate_weight(places_[id].form, parameters_->local_shape(id), table_[id].weight,
                         [&](const Shape& shape, DType dtype) {
                           const Tensor tensor(memory == nullptr ? nullptr : memory + at, shape, dtype,
                                               memory == nullptr ? Device::kMeta : target_);
                           const std::size_t alignment = alignment_on(target_);
                           at += (tensor.num_bytes() + alignment - 1) / alignment * alignment;
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
  std::size_t at = places_[id].begin;
  if (!meta && parameters_->sharded(id)) at += slots_begin_ + parameters_->slot(parameters_->unit(id)) * slot_bytes_;
  return view(id, buffer_.data(), at);
}

void QuantizedWeights::allocate() { buffer_ = Buffer(num_bytes_, target_); }

void QuantizedWeights::refresh_one(const Context& op, ParamId id) {
  quantize_weight(op, parameters_->weight(id), table_[id].weight, weight(id));
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
