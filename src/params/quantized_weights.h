// The weights of sites in low precision. They are quantized once per optimizer step, or once per pass of a unit.
// Weights of a unit that is gathered for its use (params/parameters.h) are quantized at every gathering.
#pragma once

#include "ops/kit/gemm_operand.h"
#include "params/precision.h"

namespace tessera {

class QuantizedWeights {
 public:
  /// Holds nothing: all sites are in high precision.
  QuantizedWeights() = default;
  /// Plans the quantized weights for products on `op`'s target, and allocates nothing. `table` has an entry per
  /// parameter, or none. `parameters` must outlive this. If `keep` is false, units share slots, and a unit's weights
  /// are quantized before a pass, unless a slot still holds them. `num_passes` says how many passes run at once.
  QuantizedWeights(const Context& op, const Parameters& parameters, PrecisionTable table, bool keep = true,
                   std::size_t num_passes = 1);

  const SitePrecision& precision(ParamId id) const;
  const PrecisionTable& table() const { return table_; }
  /// Returns the weight of a site whose fprop and dgrad are in low precision. It is on Device::kMeta before allocate().
  QuantizedWeight weight(ParamId id) const;

  std::size_t num_bytes() const {
    return static_cast<std::size_t>(slots_begin_ + (slot_begins_.empty() ? 0 : slot_begins_.back()));
  }
  void allocate();
  /// Returns the weights whose quantized forms are kept from step to step. Whoever changes a weight must renew its
  /// form.
  std::vector<ParamId> kept() const;
  /// Renews all that is kept. Uses memory of its own, not op's arena.
  void refresh(const Context& op) const;
  /// Quantizes a unit's weights, unless they are there. Must be called before a pass of the unit, whose weights must be
  /// acquired. `is_new` says that the unit has been gathered since its last pass. If the weights are not kept,
  /// `is_new` has no effect.
  void begin_unit(const Context& op, UnitId unit, bool is_new);
  /// Says that a pass does not read the unit's weights any more. Slots keep them until another unit needs the room.
  void end_unit(UnitId unit);
  /// Discards what is in slots.
  void forget();

 private:
  struct QuantizedPlacement {
    WeightForm form{};
    std::int64_t begin = 0;  // in bytes, in the buffer or in its unit's slot
  };
  /// Returns views of the weight's tensors, one behind the other from byte `at` on, and sets `at` to their end.
  /// `memory` may be null.
  QuantizedWeight view(ParamId id, std::byte* memory, std::int64_t& at) const;
  bool is_in_slot(ParamId id) const { return !keep_ || parameters_->sharded(id); }
  std::size_t slot_of(UnitId unit) const;
  /// Returns the quantized weights for which `which(id)` is true.
  template <typename Which>
  std::vector<ParamId> weights_where(Which&& which) const;
  /// Quantizes weights. For one without a copy it takes a matrix of scratch memory from op's arena.
  void quantize_all(const Context& op, std::span<const ParamId> ids) const;

  const Parameters* parameters_ = nullptr;
  PrecisionTable table_;
  bool keep_ = true;
  Device target_ = Device::kCpu;
  std::vector<QuantizedPlacement> places_;
  std::int64_t slots_begin_ = 0;           // in bytes
  std::vector<std::int64_t> slot_begins_;  // in bytes from slots_begin_, and last the end of all
  std::vector<std::int64_t> unit_bytes_;   // that each unit takes in a slot
  // The next members are used if the weights are not kept. A unit may take any of its layout's slots.
  struct Slot {
    std::optional<UnitId> unit;
    int num_users = 0;  // passes between begin_unit() and end_unit()
    std::uint64_t last_use = 0;
  };
  SlotLayout layout_;
  std::vector<Slot> slots_;
  std::uint64_t num_uses_ = 0;
  Buffer buffer_;
};

}  // namespace tessera
