#include "base/nearest.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

TEST(Nearest, CountsEdits) {
  EXPECT_EQ(edit_distance("", ""), 0u);
  EXPECT_EQ(edit_distance("", "abc"), 3u);
  EXPECT_EQ(edit_distance("train", "train"), 0u);
  EXPECT_EQ(edit_distance("trian", "train"), 1u);  // two neighbours exchanged count as one edit
  EXPECT_EQ(edit_distance("steps", "step"), 1u);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3u);
}

TEST(Nearest, NamesAWordOnlyIfItMayBeMeant) {
  const std::vector<std::string> words = {"train", "compare", "plan"};
  EXPECT_EQ(nearest_word("trian", words), "train");
  EXPECT_EQ(nearest_word("pln", words), "plan");
  EXPECT_EQ(nearest_word("evaluate", words), "");
  EXPECT_EQ(nearest_word("x", {}), "");
}

}  // namespace
}  // namespace tessera
