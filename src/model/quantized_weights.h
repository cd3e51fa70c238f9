// The weights of sites in low precision, quantized once per optimizer step; of a unit that is gathered for its use
// (model/parameters.h), every time.
#pragma once

#include "model/precision.h"
#include "ops/gemm_operand.h"

namespace tessera {

class QuantizedWeights {
 public:
  /// Without low precision.
  QuantizedWeights() = default;
  /// `table` has an entry per parameter, or none. Takes no memory. `parameters` must stay. `target`: a GPU reads 8-bit
  /// elements along the contraction only, and needs both orientations of square blocks as well.
  QuantizedWeights(const Parameters& parameters, PrecisionTable table, Device target = Device::kCpu);

  const SitePrecision& precision(ParamId id) const;
  const PrecisionTable& table() const { return table_; }
  /// Both orientations, of a site whose fprop or dgrad is in low precision. On Device::kMeta before allocate().
  QuantizedWeight weight(ParamId id) const;

  std::size_t num_bytes() const { return num_bytes_; }
  void allocate();
  /// From what layers read (Parameters::weight): all that are not sharded, after every change of the weights.
  void refresh(const Context& op);
  /// The sharded ones of a unit, after it was gathered.
  void refresh(const Context& op, UnitId unit);

 private:
  /// Offsets in bytes: in the buffer, or, of a sharded parameter, in its unit's slot.
  struct Place {
    std::size_t row_elements = 0, row_scales = 0, column_elements = 0, column_scales = 0;
  };
  void refresh_one(const Context& op, ParamId id);
  bool has_columns(const mx::Format& format) const { return !format.square() || target_ == Device::kCuda; }

  const Parameters* parameters_ = nullptr;
  PrecisionTable table_;
  Device target_ = Device::kCpu;
  std::vector<Place> places_;
  std::size_t slots_begin_ = 0, slot_bytes_ = 0, num_bytes_ = 0;
  Buffer buffer_;
};

}  // namespace tessera
