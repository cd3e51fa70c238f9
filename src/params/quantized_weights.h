// The weights of sites in low precision. They are quantized once per optimizer step. Weights of a unit that is gathered
// for its use (params/parameters.h) are quantized at every gathering.
#pragma once

#include "ops/kit/gemm_operand.h"
#include "params/precision.h"

namespace tessera {

class QuantizedWeights {
 public:
  /// Holds nothing: all sites are in high precision.
  QuantizedWeights() = default;
  /// Plans the quantized weights for products on `op`'s target, and allocates nothing. `table` has an entry per
  /// parameter, or none. `parameters` must outlive this.
  QuantizedWeights(const Context& op, const Parameters& parameters, PrecisionTable table);

  const SitePrecision& precision(ParamId id) const;
  const PrecisionTable& table() const { return table_; }
  /// Returns the weight of a site whose fprop or dgrad is in low precision. It is on Device::kMeta before allocate().
  QuantizedWeight weight(ParamId id) const;

  std::size_t num_bytes() const { return num_bytes_; }
  void allocate();
  /// Quantizes all weights that layers read (Parameters::weight) and that are not sharded. Must be called after every
  /// change of the weights.
  void refresh(const Context& op);
  /// Quantizes the sharded weights of a unit. Must be called after the unit was gathered.
  void refresh(const Context& op, UnitId unit);

 private:
  struct QuantizedPlacement {
    WeightForm form{};
    std::size_t begin = 0;  // in bytes, in the buffer or, if the parameter is sharded, in its unit's slot
  };
  /// Returns views of the weight's tensors, one behind the other from byte `at` on, and sets `at` to their end.
  /// `memory` may be null.
  QuantizedWeight view(ParamId id, std::byte* memory, std::size_t& at) const;
  void refresh_one(const Context& op, ParamId id);

  const Parameters* parameters_ = nullptr;
  PrecisionTable table_;
  Device target_ = Device::kCpu;
  std::vector<QuantizedPlacement> places_;
  std::size_t slots_begin_ = 0, slot_bytes_ = 0, num_bytes_ = 0;
  Buffer buffer_;
};

}  // namespace tessera
