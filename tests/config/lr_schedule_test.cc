#include "config/lr_schedule.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numbers>

namespace tessera {
namespace {

TEST(LrSchedule, WarmsUpStaysAndDecays) {
  const LrSchedule schedule{
      .warmup_steps = 4, .decay_ratio = 0.5, .decay_type = DecayType::kLinear, .min_lr_factor = 0.1};
  // The 20 steps are 4 of warm-up and 10 of decay, so 20 + 1 - 4 - 10 = 7 are stable.
  EXPECT_DOUBLE_EQ(schedule.factor(0, 20), 0.25);
  EXPECT_DOUBLE_EQ(schedule.factor(3, 20), 1.0);
  EXPECT_DOUBLE_EQ(schedule.factor(10, 20), 1.0);
  EXPECT_DOUBLE_EQ(schedule.factor(11, 20), 0.1 + 0.9 * (1.0 - 0.1));
  EXPECT_DOUBLE_EQ(schedule.factor(19, 20), 0.1 + 0.9 * (1.0 - 0.9));
}

TEST(LrSchedule, DecayShapes) {
  LrSchedule schedule{.warmup_steps = 0, .decay_ratio = -1.0, .decay_type = DecayType::kCosine, .min_lr_factor = 0.0};
  // All 10 steps are decay: stable is 1, and p = s / 10.
  EXPECT_DOUBLE_EQ(schedule.factor(0, 10), 1.0);
  EXPECT_NEAR(schedule.factor(2, 10), 0.5 * (1.0 + std::cos(0.2 * std::numbers::pi)), 1e-12);
  EXPECT_NEAR(schedule.factor(5, 10), 0.5, 1e-12);
  schedule.decay_type = DecayType::kSqrt;
  EXPECT_NEAR(schedule.factor(4, 10), 1.0 - std::sqrt(0.4), 1e-12);
}

TEST(LrSchedule, ADecayGetsWhatTheWarmUpLeaves) {
  const LrSchedule schedule{
      .warmup_steps = 8, .decay_ratio = 0.5, .decay_type = DecayType::kLinear, .min_lr_factor = 0.0};
  // Of the 10 steps, the decay gets 2 of the 5 that it asks for.
  EXPECT_DOUBLE_EQ(schedule.factor(7, 10), 1.0);
  EXPECT_DOUBLE_EQ(schedule.factor(8, 10), 1.0);
  EXPECT_DOUBLE_EQ(schedule.factor(9, 10), 0.5);
}

TEST(LrSchedule, DecayStepsAreRounded) {
  const LrSchedule schedule{
      .warmup_steps = 0, .decay_ratio = 0.27, .decay_type = DecayType::kLinear, .min_lr_factor = 0.0};
  // Of the 10 steps, 3 are decay and 8 are stable.
  EXPECT_DOUBLE_EQ(schedule.factor(7, 10), 1.0);
  EXPECT_DOUBLE_EQ(schedule.factor(8, 10), 1.0 - 1.0 / 3.0);
}

TEST(LrSchedule, WarmupLongerThanTheRunIsCut) {
  const LrSchedule schedule{.warmup_steps = 2000};
  EXPECT_DOUBLE_EQ(schedule.factor(0, 10), 0.1);
  EXPECT_DOUBLE_EQ(schedule.factor(9, 10), 1.0);
}

TEST(LrSchedule, AScheduleOfItsOwnLength) {
  const LrSchedule schedule{.warmup_steps = 2, .total_steps = 10, .min_lr_factor = 0.1};
  const LrSchedule of_run{.warmup_steps = 2, .min_lr_factor = 0.1};
  for (std::int64_t step = 0; step < 10; ++step) {
    EXPECT_EQ(schedule.factor(step, 100), of_run.factor(step, 10)) << step;
    EXPECT_EQ(schedule.factor(step, 5), of_run.factor(step, 10)) << step;
  }
  for (const std::int64_t step : {10, 11, 99}) EXPECT_EQ(schedule.factor(step, 100), of_run.factor(9, 10)) << step;
}

}  // namespace
}  // namespace tessera
