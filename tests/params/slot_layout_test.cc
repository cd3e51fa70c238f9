#include "params/slot_layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tessera {
namespace {

using ::testing::ElementsAre;
using Sizes = std::vector<std::int64_t>;

constexpr SlotLayout::Counts kAtOnce{.layers = 2, .vocabulary = 1, .together = 2};

TEST(SlotLayout, AUnitsOwnSlotHasItsSize) {
  const SlotLayout layout = SlotLayout::per_unit(3);
  EXPECT_EQ(layout.num_slots(), 3u);
  EXPECT_THAT(layout.begins(Sizes{5, 0, 7}), ElementsAre(0, 5, 5, 12));
  EXPECT_EQ(layout.slots_of(2).begin, 2u);
  EXPECT_EQ(layout.slots_of(2).end, 3u);
}

TEST(SlotLayout, ALargeVocabularyHasSlotsOfItsOwn) {
  const std::vector<SlotLayout::Unit> units = {{10, true}, {3, false}, {4, false}, {12, true}};
  const SlotLayout layout = SlotLayout::shared(units, kAtOnce);
  EXPECT_THAT(layout.begins(Sizes{10, 3, 4, 12}), ElementsAre(0, 4, 8, 20));
  for (const std::size_t unit : {0u, 3u}) EXPECT_EQ(layout.slots_of(unit).begin, 2u);
  for (const std::size_t unit : {1u, 2u}) EXPECT_EQ(layout.slots_of(unit).end, 2u);
  // The same slots may have other memory, with other sizes.
  EXPECT_THAT(layout.begins(Sizes{0, 8, 9, 1}), ElementsAre(0, 9, 18, 19));
}

// Three slots would take 5 + 5 + 6, and two take 6 + 6.
TEST(SlotLayout, UnitsOfAboutOneSizeShareAllSlots) {
  const std::vector<SlotLayout::Unit> units = {{6, true}, {5, false}, {4, false}};
  const SlotLayout layout = SlotLayout::shared(units, kAtOnce);
  EXPECT_THAT(layout.begins(Sizes{6, 5, 4}), ElementsAre(0, 6, 12));
  EXPECT_EQ(layout.slots_of(0).begin, layout.slots_of(1).begin);
}

TEST(SlotLayout, NoUnitsHaveNoSlots) {
  const SlotLayout layout;
  EXPECT_EQ(layout.num_slots(), 0u);
  EXPECT_THAT(layout.begins(Sizes{0, 0}), ElementsAre(0));
}

}  // namespace
}  // namespace tessera
