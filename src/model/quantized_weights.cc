#include "model/quantized_weights.h"

#include "ops/quantize.h"

namespace tessera {
QuantizedWeights::QuantizedWeights(const Parameters& parameters, PrecisionTable table) : table_(std::move(table)) {
  TESSERA_CHECK(table_.empty() || table_.size() == parameters.size(), "{} {}", table_.size(), parameters.size());
  const auto take = [&](const Shape& shape, DType dtype) {
    const std::size_t at = num_bytes_;
    const std::size_t bytes = static_cast<std::size_t>(shape.num_elements()) * size_of(dtype);
    num_bytes_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return at;
  };
  for (ParamId id = 0; id < table_.size(); ++id) {
    Place place{.shape = parameters.spec(id).shape,
                .row_elements = 0,
                .row_scales = 0,
                .column_elements = 0,
                .column_scales = 0};
    if (table_[id].quantizes_weight()) {
      const mx::Format& format = table_[id].weight;
      place.row_elements = take(place.shape, DType::kFloat8E4M3);
      place.row_scales = take(mx::scales_shape(place.shape, format), mx::scales_dtype(format));
      if (!format.square()) {
        place.column_elements = take(place.shape, DType::kFloat8E4M3);
        place.column_scales = take(mx::scales_shape(mx::transposed(place.shape), format), mx::scales_dtype(format));
      }
    }
    places_.push_back(place);
  }
}

const SitePrecision& QuantizedWeights::precision(ParamId id) const {
  static const SitePrecision kNone;
  return table_.empty() ? kNone : table_[id];
}

mx::Quantized QuantizedWeights::view(const Shape& shape, const mx::Format& format, std::size_t elements,
                                     std::size_t scales) const {
  const bool meta = buffer_.data() == nullptr;
  const auto at = [&](std::size_t offset) { return meta ? nullptr : buffer_.data() + offset; };
  const Device device = meta ? Device::kMeta : Device::kCpu;
  return {Tensor(at(elements), shape, DType::kFloat8E4M3, device),
          Tensor(at(scales), mx::scales_shape(shape, format), mx::scales_dtype(format), device), format};
}

QuantizedWeight QuantizedWeights::weight(ParamId id) const {
  TESSERA_CHECK(precision(id).quantizes_weight());
  const Place& place = places_[id];
  const mx::Format& format = table_[id].weight;
  QuantizedWeight weight{.rows = view(place.shape, format, place.row_elements, place.row_scales), .columns = {}};
  if (!format.square()) {
    weight.columns = view(mx::transposed(place.shape), format, place.column_elements, place.column_scales);
  }
  return weight;
}

void QuantizedWeights::allocate() { buffer_ = Buffer(num_bytes_); }

void QuantizedWeights::refresh(const Context& op, const Parameters& parameters) {
  const TraceScope trace(op.trace, "quantize_weights");
  for (ParamId id = 0; id < table_.size(); ++id) {
    if (!table_[id].quantizes_weight()) continue;
    const QuantizedWeight quantized = weight(id);
    quantize(op, parameters.weight(id), quantized.rows, quantized.columns);
  }
}

}  // namespace tessera
