// The weights of sites in low precision, quantized once per optimizer step; of a unit that is gathered for its use
// (params/parameters.h), every time.
#pragma once

#include "ops/kit/gemm_operand.h"
#include "params/precision.h"

namespace tessera {

class QuantizedWeights {
 public:
  /// Without low precision.
  QuantizedWeights() = default;
  /// For products of `op`'s target. `table` has an entry per parameter, or none. Takes no memory. `parameters` must
  /// stay.
  QuantizedWeights(const Context& op, const Parameters& parameters, PrecisionTable table);

  const SitePrecision& precision(ParamId id) const;
  const PrecisionTable& table() const { return table_; }
  /// Of a site whose fprop or dgrad is in low precision. On Device::kMeta before allocate().
  QuantizedWeight weight(ParamId id) const;

  std::size_t num_bytes() const { return num_bytes_; }
  void allocate();
  /// From what layers read (Parameters::weight): all that are not sharded, after every change of the weights.
  void refresh(const Context& op);
  /// The sharded ones of a unit, after it was gathered.
  void refresh(const Context& op, UnitId unit);

 private:
  struct Place {
    WeightForm form{};
    std::size_t begin = 0;  // in bytes: in the buffer, or, of a sharded parameter, in its unit's slot
  };
  /// One tensor behind the other from byte `at` on, which becomes the end; `memory` may be null.
  QuantizedWeight view(ParamId id, std::byte* memory, std::size_t& at) const;
  void refresh_one(const Context& op, ParamId id);

  const Parameters* parameters_ = nullptr;
  PrecisionTable table_;
  Device target_ = Device::kCpu;
  std::vector<Place> places_;
  std::size_t slots_begin_ = 0, slot_bytes_ = 0, num_bytes_ = 0;
  Buffer buffer_;
};

}  // namespace tessera
