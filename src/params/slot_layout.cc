#include "params/slot_layout.h"

#include <algorithm>

namespace tessera {

SlotLayout SlotLayout::per_unit(std::size_t num_units) {
  SlotLayout layout;
  layout.num_slots_ = num_units;
  for (std::size_t unit = 0; unit < num_units; ++unit) layout.slots_of_.push_back({unit, unit + 1});
  return layout;
}

SlotLayout SlotLayout::shared(std::span<const Unit> units, const Counts& at_once) {
  SlotLayout one_size, two_sizes;
  one_size.num_slots_ = at_once.together;
  two_sizes.num_slots_ = at_once.layers + at_once.vocabulary;
  std::vector<std::int64_t> sizes;
  for (const Unit& unit : units) {
    sizes.push_back(unit.size);
    one_size.slots_of_.push_back({0, one_size.num_slots_});
    two_sizes.slots_of_.push_back(unit.is_of_vocabulary ? Range{at_once.layers, two_sizes.num_slots_}
                                                        : Range{0, at_once.layers});
  }
  return two_sizes.begins(sizes).back() < one_size.begins(sizes).back() ? two_sizes : one_size;
}

std::vector<std::int64_t> SlotLayout::begins(std::span<const std::int64_t> sizes) const {
  std::vector<std::int64_t> result(num_slots_ + 1);
  for (std::size_t unit = 0; unit < slots_of_.size(); ++unit) {
    for (std::size_t slot = slots_of_[unit].begin; slot < slots_of_[unit].end; ++slot) {
      result[slot + 1] = std::max(result[slot + 1], sizes[unit]);
    }
  }
  for (std::size_t slot = 0; slot < num_slots_; ++slot) result[slot + 1] += result[slot];
  return result;
}

}  // namespace tessera
