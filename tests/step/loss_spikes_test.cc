#include "step/loss_spikes.h"

#include <gtest/gtest.h>

#include <cmath>

namespace tessera {
namespace {

TEST(LossSpike, IsAboveAMultipleOfTheMeanOfTwentyLosses) {
  LossSpikes spikes(2.0);
  for (int i = 1; i <= 25; ++i) {
    EXPECT_EQ(std::isinf(spikes.largest()), i <= 20) << "before loss " << i;
    spikes.add(i);
  }
  EXPECT_EQ(spikes.largest(), 31.0);  // twice the mean of 6 to 25
}

}  // namespace
}  // namespace tessera
