// Which slots a unit may use, and where slots lie in memory (params/unit_slots.h).
//
// Either each unit has a slot of its own size, or units share slots, which then have the size of the largest of them.
// Units of the vocabulary (the embedding and the head) share slots with layers, or among themselves, whichever takes
// less memory.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace tessera {

class SlotLayout {
 public:
  struct Range {
    std::size_t begin = 0, end = 0;
  };

  /// Makes no slots.
  SlotLayout() = default;
  /// Gives each of `num_units` units a slot of its own.
  static SlotLayout per_unit(std::size_t num_units);
  /// Describes a unit that shares slots.
  struct Unit {
    std::int64_t size;
    bool is_of_vocabulary;
  };
  /// Says how many units are in slots at once: of layers, of the vocabulary, and together.
  struct Counts {
    std::size_t layers, vocabulary, together;
  };
  /// Makes slots that units share.
  static SlotLayout shared(std::span<const Unit> units, const Counts& at_once);

  std::size_t num_slots() const { return num_slots_; }
  /// Returns the slots that the unit may use.
  Range slots_of(std::size_t unit) const { return slots_of_[unit]; }
  /// Returns where each slot begins if the units have these sizes, and last the sum of all slots' sizes.
  std::vector<std::int64_t> begins(std::span<const std::int64_t> sizes) const;

 private:
  std::size_t num_slots_ = 0;
  std::vector<Range> slots_of_;  // indexed by unit
};

}  // namespace tessera
