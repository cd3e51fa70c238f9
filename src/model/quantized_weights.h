// The weights of sites in low precision, quantized once per optimizer step.
#pragma once

#include "model/precision.h"
#include "ops/gemm_operand.h"

namespace tessera {

class QuantizedWeights {
 public:
  /// Without low precision.
  QuantizedWeights() = default;
  /// `table` has an entry per parameter, or none. Takes no memory.
  QuantizedWeights(const Parameters& parameters, PrecisionTable table);

  const SitePrecision& precision(ParamId id) const;
  const PrecisionTable& table() const { return table_; }
  /// Both orientations, of a site whose fprop or dgrad is in low precision. On Device::kMeta before allocate().
  QuantizedWeight weight(ParamId id) const;

  std::size_t num_bytes() const { return num_bytes_; }
  void allocate();
  /// From what layers read (Parameters::weight). After every change of the weights.
  void refresh(const Context& op, const Parameters& parameters);

 private:
  struct Place {
    Shape shape;
    std::size_t row_elements, row_scales, column_elements, column_scales;  // offsets in bytes
  };
  mx::Quantized view(const Shape& shape, const mx::Format& format, std::size_t elements, std::size_t scales) const;

  PrecisionTable table_;
  std::vector<Place> places_;
  std::size_t num_bytes_ = 0;
  Buffer buffer_;
};

}  // namespace tessera
