#include "launch/ladder.h"

#include <gmock/gmock.h>

namespace tessera {
namespace {

using ::testing::HasSubstr;

constexpr double kMinute = 60.0;

Failure failure(FailureKind kind, const std::string& node, std::int64_t step = 7) {
  return {.kind = kind, .node = node, .sure = Certainty::kCertain, .step = step};
}

TEST(Ladder, ARankThatDiedIsStartedOnTheSameNodesFirstThenOnASpare) {
  Ladder ladder(10, false);
  EXPECT_EQ(ladder.decide(failure(FailureKind::kRankDied, "n1", 5), 1, 0).action, Action::kRestart);
  EXPECT_EQ(ladder.decide(failure(FailureKind::kRankDied, "n2", 6), 1, 1).action, Action::kRestart);
  EXPECT_EQ(ladder.decide(failure(FailureKind::kRankDied, "n1", 9), 1, 2).action, Action::kReplace);
}

TEST(Ladder, ASickNodeIsReplacedWhereThereIsASpare) {
  Ladder ladder(10, false);
  EXPECT_EQ(ladder.decide(failure(FailureKind::kNodeSick, "n1", 5), 1, 0).action, Action::kReplace);
  EXPECT_EQ(ladder.decide(failure(FailureKind::kNodeSick, "n2", 5), 0, 1).action, Action::kRestart);
}

TEST(Ladder, ANodeThatAnOperatorReturnedBeginsAnew) {
  Ladder ladder(10, false);
  EXPECT_EQ(ladder.decide(failure(FailureKind::kRankDied, "n1", 5), 1, 0).action, Action::kRestart);
  EXPECT_EQ(ladder.decide(failure(FailureKind::kRankDied, "n1", 6), 1, 1).action, Action::kReplace);
  ladder.forget_failures("n1");
  EXPECT_EQ(ladder.decide(failure(FailureKind::kRankDied, "n1", 9), 1, 2).action, Action::kRestart);
  EXPECT_EQ(ladder.decide(failure(FailureKind::kRankDied, "n1", 10), 1, 3).action, Action::kReplace);
}

TEST(Ladder, AnInputThatCannotWorkOnOneNodeIsItsFailureOnceTheRunHasTrained) {
  Ladder ladder(10, false);
  EXPECT_EQ(ladder.decide(failure(FailureKind::kWrongInput, "n1", 0), 1, 0).status, ExitStatus::kWrongInput);
  ladder.note_training();
  EXPECT_EQ(ladder.decide(failure(FailureKind::kWrongInput, "n1", 0), 1, 1).action, Action::kRestart);
  EXPECT_EQ(ladder.decide(failure(FailureKind::kWrongInput, "n1", 0), 1, 2).action, Action::kReplace);
  EXPECT_EQ(ladder.decide(failure(FailureKind::kWrongInput, "", 0), 1, 3).action, Action::kStop);
}

/// Storage may be away for minutes. It says nothing of the step at which it failed.
TEST(Ladder, StorageThatFailsAgainIsLeftAloneForLongerEachTime) {
  Ladder ladder(10, false);
  double now = 1e4, total = 0.0;
  for (const double pause : {0.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0, 300.0, 300.0, 300.0}) {
    const Decision decision = ladder.decide(failure(FailureKind::kStorageFailed, ""), 0, now);
    EXPECT_EQ(decision.action, Action::kRestart);
    EXPECT_DOUBLE_EQ(decision.pause_seconds, pause);
    total += pause;
    now += pause;
  }
  EXPECT_GT(total, 30 * kMinute);  // which takes more restarts than --restarts-per-hour
  EXPECT_EQ(Ladder(0, false).decide(failure(FailureKind::kStorageFailed, ""), 0, now).action, Action::kStop);
  EXPECT_DOUBLE_EQ(ladder.decide(failure(FailureKind::kRankDied, "n1"), 0, now).pause_seconds, 0.0);
  EXPECT_DOUBLE_EQ(ladder.decide(failure(FailureKind::kStorageFailed, ""), 0, now + 61 * kMinute).pause_seconds, 0.0);
}

TEST(Ladder, ALostNodeIsReplacedOrTheSchedulerIsAskedOrTheRunStops) {
  EXPECT_EQ(Ladder(10, true).decide(failure(FailureKind::kNodeLost, "n1"), 1, 0).action, Action::kReplace);
  const Decision requeue = Ladder(10, true).decide(failure(FailureKind::kNodeLost, "n1"), 0, 0);
  EXPECT_EQ(requeue.action, Action::kRequeue);
  EXPECT_EQ(requeue.status, ExitStatus::kRequeue);
  const Decision stop = Ladder(10, false).decide(failure(FailureKind::kNodeLost, "n1"), 0, 0);
  EXPECT_EQ(stop.action, Action::kStop);
  EXPECT_EQ(stop.status, ExitStatus::kHold);
  EXPECT_THAT(stop.reason, HasSubstr("no spare"));
}

TEST(Ladder, AStepThatIsNotFiniteOnOtherHardwareStopsTheRun) {
  Ladder ladder(10, false);
  EXPECT_EQ(ladder.decide(failure(FailureKind::kNonFinite, "n1"), 2, 0).action, Action::kReplace);
  const Decision second = ladder.decide(failure(FailureKind::kNonFinite, "n3"), 1, 1);
  EXPECT_EQ(second.action, Action::kStop);
  EXPECT_THAT(second.reason, HasSubstr("on different nodes"));
}

// Only steps that were not finite say something about the step. Another failure there may have any reason.
TEST(Ladder, AStepThatWasNotFiniteOnOneNodeIsTriedElsewhere) {
  Ladder ladder(10, false);
  EXPECT_EQ(ladder.decide(failure(FailureKind::kRankDied, "n1"), 2, 0).action, Action::kRestart);
  EXPECT_EQ(ladder.decide(failure(FailureKind::kNonFinite, "n2"), 2, 1).action, Action::kReplace);
  Ladder of_unknown(10, false);
  EXPECT_EQ(of_unknown.decide(failure(FailureKind::kNonFinite, ""), 2, 0).action, Action::kRestart);
  EXPECT_EQ(of_unknown.decide(failure(FailureKind::kNonFinite, "n1"), 2, 1).action, Action::kReplace);
}

TEST(Ladder, ASecondFailureWithoutASpareSaysSo) {
  Ladder ladder(10, false);
  ladder.decide(failure(FailureKind::kRankDied, "n1", 5), 0, 0);
  const Decision second = ladder.decide(failure(FailureKind::kRankDied, "n1", 9), 0, 1);
  EXPECT_EQ(second.action, Action::kRestart);
  EXPECT_THAT(second.reason, HasSubstr("n1 has failed 2 times, and there is no spare"));
}

TEST(Ladder, ALossSpikeStopsTheRunAndCostsNoNode) {
  Ladder ladder(10, false);
  const Decision decision = ladder.decide(failure(*kind_of_status(76), "n1", 40), 2, 0);
  EXPECT_EQ(decision.action, Action::kStop);
  EXPECT_EQ(decision.status, ExitStatus::kHold);
  EXPECT_THAT(decision.reason, HasSubstr("the loss of step 40 is a spike"));
}

TEST(Ladder, AStepThatAlwaysFailsStopsTheRun) {
  Ladder ladder(10, false);
  EXPECT_EQ(ladder.decide(failure(FailureKind::kProgramError, "n1"), 0, 0).action, Action::kRestart);
  EXPECT_EQ(ladder.decide(failure(FailureKind::kProgramError, "n1"), 0, 1).action, Action::kRestart);
  EXPECT_EQ(ladder.decide(failure(FailureKind::kProgramError, "n1"), 0, 2).action, Action::kStop);
}

TEST(Ladder, LostNodesAtTheSameStepAreHardware) {
  Ladder ladder(10, false);
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(ladder.decide(failure(FailureKind::kNodeLost, "n1"), 1, i).action, Action::kReplace);
  }
}

TEST(Ladder, RestartsOfAnHourAreCounted) {
  Ladder ladder(2, true);
  EXPECT_EQ(ladder.decide(failure(FailureKind::kRankDied, "n1", 1), 0, 0).action, Action::kRestart);
  EXPECT_EQ(ladder.decide(failure(FailureKind::kRankDied, "n1", 2), 0, kMinute).action, Action::kRestart);
  const Decision third = ladder.decide(failure(FailureKind::kRankDied, "n1", 3), 0, 2 * kMinute);
  EXPECT_EQ(third.action, Action::kStop);
  EXPECT_THAT(third.reason, HasSubstr("--restarts-per-hour"));
  EXPECT_EQ(ladder.decide(failure(FailureKind::kRankDied, "n1", 4), 0, 60.5 * kMinute).action, Action::kRestart);
}

TEST(Ladder, WhatARestartCannotMendStopsWithItsOwnStatus) {
  EXPECT_EQ(Ladder(10, true).decide(failure(FailureKind::kWrongInput, "n1"), 1, 0).status, ExitStatus::kWrongInput);
  EXPECT_EQ(Ladder(10, true).decide(failure(FailureKind::kTakenOver, "n1"), 1, 0).status, ExitStatus::kTakenOver);
}

/// Nodes that are slow or sick at the same step do not show that the program or the data is at fault.
TEST(Ladder, SlowAndSickNodesSayNothingOfTheStep) {
  for (const FailureKind kind : {FailureKind::kRankSlow, FailureKind::kNodeSick}) {
    Ladder ladder(10, false);
    for (const char* node : {"n1", "n2", "n3", "n4"})
      EXPECT_EQ(ladder.decide(failure(kind, node, 5), 1, 0).action, Action::kReplace);
  }
}

}  // namespace
}  // namespace tessera
