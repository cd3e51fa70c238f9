#include "health/drain.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

const std::string kReason = "[node_problem] gpuXid: GPU 3: XID 79";
const NodeVerdict kBad = {
    .node = "n1", .time = 100.0, .level = HealthLevel::kBad, .reason = kReason, .bad_since = 90.0};
const NodeVerdict kChecked = {.node = "n1", .time = 100.0, .active_check = 95.0};

TEST(Drain, ABadNodeIsDrained) {
  EXPECT_EQ(decide(kBad, {}, {}, 1, 101.0), DrainAction::kDrain);
  EXPECT_EQ(decide(kBad, {.is_drained = true, .reason = kReason}, kReason, 1, 101.0), DrainAction::kNone);
  EXPECT_EQ(decide({.node = "n1", .time = 100.0, .level = HealthLevel::kSuspect}, {}, {}, 1, 101.0),
            DrainAction::kNone);
}

TEST(Drain, NoMoreThanTheLimit) {
  EXPECT_EQ(decide(kBad, {.num_drained = 1}, {}, 1, 101.0), DrainAction::kLimited);
  EXPECT_EQ(decide(kBad, {.num_drained = 1}, {}, 2, 101.0), DrainAction::kDrain);
}

TEST(Drain, AVerdictOfADeadDaemonSaysNothing) {
  EXPECT_EQ(decide(kBad, {}, {}, 1, 200.0), DrainAction::kNone);
  EXPECT_EQ(decide(kBad, {}, {}, 1, 1.0), DrainAction::kNone);  // its clock was ahead
}

TEST(Drain, OnlyWhatWeDrainedIsReturnedAndOnlyAfterAnActiveCheck) {
  const SchedulerNode ours = {.is_drained = true, .reason = kReason};
  EXPECT_EQ(decide(kChecked, ours, kReason, 1, 101.0), DrainAction::kUndrain);
  EXPECT_EQ(decide(kChecked, ours, {}, 1, 101.0), DrainAction::kNone);
  EXPECT_EQ(decide(kChecked, {.is_drained = true, .reason = "disk swap"}, kReason, 1, 101.0), DrainAction::kNone);
  EXPECT_EQ(decide(kChecked, {.is_drained = true}, "", 1, 101.0), DrainAction::kNone);  // somebody gave no reason
  EXPECT_EQ(decide({.node = "n1", .time = 100.0}, ours, kReason, 1, 101.0), DrainAction::kNone);
  NodeVerdict suspect = kChecked;
  suspect.level = HealthLevel::kSuspect;
  EXPECT_EQ(decide(suspect, ours, kReason, 1, 101.0), DrainAction::kNone);
  EXPECT_EQ(decide(kChecked, {}, kReason, 1, 101.0), DrainAction::kNone);
}

}  // namespace
}  // namespace tessera
