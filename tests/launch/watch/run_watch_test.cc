#include "launch/watch/run_watch.h"

#include <gmock/gmock.h>

#include <cmath>

namespace tessera {
namespace {

using ::testing::HasSubstr;

/// Watches three nodes with one rank each, whose reports a test makes.
class RunWatchTest : public ::testing::Test {
 protected:
  /// Reports at `now` for all ranks that are not silent. They are in `step`, which began 0.1 s before.
  void report(double now, std::int64_t step) {
    for (int rank = 0; rank < 3; ++rank) {
      RankReport& of_rank = ranks_[static_cast<std::size_t>(rank)];
      of_rank.rank = rank;
      of_rank.step = step;
      of_rank.section = "step";
      of_rank.section_seconds = 0.1;
      if (!silent_[static_cast<std::size_t>(rank)]) watch_.report(node(rank), {of_rank}, now);
    }
  }
  static std::string node(int rank) { return "n" + std::to_string(rank + 1); }

  /// Reports steps of a second each, from `first` to `last`. Expects that the watch finds nothing.
  void train(std::int64_t first, std::int64_t last) {
    for (std::int64_t step = first; step <= last; ++step) {
      report(static_cast<double>(step), step);
      const auto found = watch_.find(static_cast<double>(step));
      EXPECT_FALSE(found) << (found ? found->evidence.front() : "");
    }
  }

  RunWatch watch_{WatchOptions{}, {"n1", "n2", "n3"}, 1, 0.0};
  std::vector<RankReport> ranks_{3};
  std::vector<bool> silent_ = {false, false, false};
};

TEST_F(RunWatchTest, ARunThatGetsOnIsLeftAlone) {
  train(1, 60);
  EXPECT_EQ(watch_.step(), 60);
  EXPECT_NEAR(watch_.step_seconds(), 1.0, 1e-9);
}

TEST_F(RunWatchTest, ASilentNodeIsLost) {
  train(1, 10);
  silent_[1] = true;
  std::optional<Failure> found;
  double now = 10.0;
  while (!found && now < 20.0) {
    now += 0.5;
    report(now, 10);
    found = watch_.find(now);
  }
  ASSERT_TRUE(found);
  EXPECT_EQ(found->kind, FailureKind::kNodeLost);
  EXPECT_EQ(found->node, "n2");
  EXPECT_NEAR(now, 14.5, 0.01);
}

TEST_F(RunWatchTest, ASuspendedLauncherBlamesNobody) {
  train(1, 10);
  EXPECT_FALSE(watch_.find(500.0));
  EXPECT_FALSE(watch_.find(500.5));
}

/// When its monitor reports again, a rank has been in its step for as long as the suspension took.
TEST_F(RunWatchTest, AStepThatWasSuspendedWithTheLauncherIsNotLate) {
  train(1, 10);
  for (double now = 500.0; now < 503.0; now += 0.5) {
    for (RankReport& rank : ranks_) {
      rank.section_seconds = now - 10.0;
      watch_.report(node(rank.rank), {rank}, now);
    }
    const auto found = watch_.find(now);
    EXPECT_FALSE(found) << found->evidence.front();
  }
  // The next step has its usual limit.
  for (double now = 503.0; now < 509.5; now += 0.5) {
    for (RankReport& rank : ranks_) {
      rank.step = 11;
      rank.section_seconds = now - 503.0;
      watch_.report(node(rank.rank), {rank}, now);
    }
    EXPECT_EQ(watch_.find(now).has_value(), now > 508.0) << now;
  }
}

TEST_F(RunWatchTest, AKilledRankIsBlamedAndNotThoseThatEndedBecauseOfIt) {
  train(1, 10);
  ranks_[0].is_ended = true;
  ranks_[0].exit_status = 70;
  ranks_[2].is_ended = true;
  report(10.5, 10);
  const auto found = watch_.find(10.5);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->kind, FailureKind::kRankDied);
  EXPECT_EQ(found->rank, 2);
  EXPECT_EQ(found->node, "n3");
}

TEST_F(RunWatchTest, ARanksOwnReasonCounts) {
  train(1, 10);
  ranks_[0].is_ended = true;
  ranks_[1].is_ended = true;
  ranks_[1].exit_status = 71;
  ranks_[1].end_message = "step 11 is not finite";
  report(10.5, 10);
  const auto found = watch_.find(10.5);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->kind, FailureKind::kNonFinite);
  EXPECT_EQ(found->rank, 1);
  EXPECT_THAT(found->evidence.front(), HasSubstr("step 11 is not finite"));
}

/// An error that the program, the data or the storage causes on all ranks is no node's fault.
TEST_F(RunWatchTest, AnErrorThatAllRanksReportBlamesNobody) {
  train(1, 10);
  for (const int status : {1, 2, 71, 72, 73, 74}) {
    for (RankReport& rank : ranks_) {
      rank.is_ended = true;
      rank.exit_status = status;
      rank.end_message = "tensor of rank " + std::to_string(rank.rank) + " has a wrong shape";
    }
    report(10.5, 10);
    const auto found = watch_.find(10.5);
    ASSERT_TRUE(found);
    EXPECT_EQ(found->kind, kind_of_status(status));
    EXPECT_FALSE(found->rank) << status;
    EXPECT_EQ(found->node, "") << status;
    EXPECT_EQ(found->sure, Certainty::kUnknown) << status;
    EXPECT_THAT(found->evidence.front(), HasSubstr("wrong shape"));
  }
  // If one rank says something else, what the others say counts again.
  ranks_[0].exit_status = 143;
  ranks_[1].exit_status = ranks_[2].exit_status = 1;
  report(10.6, 10);
  const auto found = watch_.find(10.6);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->rank, 1);
  EXPECT_EQ(found->node, "n2");
}

TEST_F(RunWatchTest, WhenAllRanksAreKilledNobodyIsBlamed) {
  train(1, 10);
  for (RankReport& rank : ranks_) rank.is_ended = true;
  report(10.5, 10);
  const auto found = watch_.find(10.5);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->kind, FailureKind::kRankDied);
  EXPECT_EQ(found->step, 10);
  EXPECT_FALSE(found->rank);
  EXPECT_EQ(found->node, "");
  EXPECT_EQ(found->sure, Certainty::kUnknown);
  EXPECT_THAT(found->evidence.front(), HasSubstr("all 3 ranks"));
}

TEST_F(RunWatchTest, OneStoppedRankHangsAndAllStoppedRanksAreSuspended) {
  train(1, 10);
  for (RankReport& rank : ranks_) rank.is_stopped = true;
  for (double now = 10.5; now < 13.0; now += 0.5) {
    report(now, 10);
    EXPECT_FALSE(watch_.find(now));
  }
  // Ranks continue one after the other. The first to continue finds the others still stopped.
  ranks_[0].is_stopped = ranks_[2].is_stopped = false;
  report(13.0, 10);
  EXPECT_FALSE(watch_.find(13.0));
  report(15.0, 10);
  const auto found = watch_.find(15.0);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->kind, FailureKind::kRankHung);
  EXPECT_EQ(found->rank, 1);
}

TEST_F(RunWatchTest, AStepInWhichAllRanksWereStoppedIsNotLate) {
  train(1, 10);
  for (double now = 10.5; now < 40.0; now += 0.5) {
    for (RankReport& rank : ranks_) {
      rank.is_stopped = now < 35.0;
      rank.section_seconds = now - 10.0;
      watch_.report(node(rank.rank), {rank}, now);
    }
    const auto found = watch_.find(now);
    EXPECT_FALSE(found) << found->evidence.front();
  }
}

/// Ranks vote while some of them load, check or write large files. So their operations show that they live.
TEST_F(RunWatchTest, LongSectionsAreLateOnceRanksDoNotVote) {
  train(1, 10);
  WatchOptions options;
  for (const std::string section : {"loading", "validation", "checkpoint"}) {
    const double limit = section == "loading" ? options.start_timeout : options.other_timeout;
    const double begin = 1000.0, last_vote = 2000.0;
    std::optional<double> late;
    for (double now = begin; now < last_vote + limit + 10.0 && !late; now += 0.5) {
      for (RankReport& rank : ranks_) {
        rank.section = section;
        rank.section_seconds = now - begin;
        rank.operation_seconds = std::max(0.1, now - last_vote);
        watch_.report(node(rank.rank), {rank}, now);
      }
      if (watch_.find(now)) late = now;
    }
    ASSERT_TRUE(late) << section;
    EXPECT_NEAR(*late, last_vote + limit, 1.0) << section;
  }
}

/// A single rank votes with nobody, and its storage may take long.
TEST(RunWatchOfOneRank, MaySaveForLong) {
  RunWatch watch({}, {"n1"}, 1, 0.0);
  for (double now = 0.5; now < 1000.0; now += 0.5) {
    RankReport report;
    report.section = "checkpoint";
    report.section_seconds = report.operation_seconds = now;
    watch.report("n1", {report}, now);
    EXPECT_FALSE(watch.find(now)) << now;
  }
}

TEST_F(RunWatchTest, AStepThatTakesThreeTimesAsLongAndFiveSecondsHangs) {
  train(1, 20);
  std::optional<Failure> found;
  double now = 20.0;
  while (!found && now < 30.0) {
    now += 0.5;
    for (RankReport& rank : ranks_) {
      rank.section_seconds = now - 20.0;
      watch_.report(node(rank.rank), {rank}, now);
    }
    found = watch_.find(now);
  }
  ASSERT_TRUE(found);
  EXPECT_EQ(found->kind, FailureKind::kRankHung);
  EXPECT_FALSE(found->rank);
  EXPECT_NEAR(now, 25.5, 0.01);
}

TEST_F(RunWatchTest, ASlowRankIsFoundByItsOwnTimeWithinTwoWindows) {
  std::optional<Failure> found;
  std::int64_t step = 0;
  while (!found && step < 60) {
    ++step;
    // Every step takes a second. Rank 1 computes for 0.9 s of it. The others compute for 0.4 s and wait.
    for (RankReport& rank : ranks_) rank.idle_seconds += rank.rank == 1 ? 0.1 : 0.6;
    report(static_cast<double>(step), step);
    found = watch_.find(static_cast<double>(step));
  }
  ASSERT_TRUE(found);
  EXPECT_EQ(found->kind, FailureKind::kRankSlow);
  EXPECT_EQ(found->rank, 1);
  EXPECT_LE(step, 15);  // 3 steps, and two windows of 6
}

TEST_F(RunWatchTest, ARankIsNotSlowForAMoment) {
  // Steps take 0.2 s. For 2.2 s of every 8 s rank 1 computes five times as long as the others, as if beside another
  // program.
  for (int i = 1; i < 1000; ++i) {
    const double now = 0.2 * i;
    const bool is_busy = std::fmod(now, 8.0) >= 5.8;
    for (RankReport& rank : ranks_) rank.idle_seconds += rank.rank == 1 && is_busy ? 0.0 : 0.16;
    report(now, i);
    const auto found = watch_.find(now);
    ASSERT_FALSE(found) << found->evidence.front();
  }
}

TEST_F(RunWatchTest, RanksThatDoNotComeFailTheStart) {
  std::optional<Failure> found;
  double now = 0.0;
  while (!found && now < 400.0) {
    now += 1.0;
    watch_.report("n1", {}, now);
    watch_.report("n2", {}, now);
    watch_.report("n3", {}, now);
    found = watch_.find(now);
  }
  ASSERT_TRUE(found);
  EXPECT_EQ(found->kind, FailureKind::kStartFailed);
  EXPECT_EQ(now, 301.0);
}

/// Steps of 4 s are long enough that three times a step is more than the 5 s that count for short ones.
TEST_F(RunWatchTest, ALongStepHangsAfterThreeTimesItsLength) {
  for (std::int64_t step = 1; step <= 20; ++step) {
    for (double now = 4.0 * static_cast<double>(step); now < 4.0 * static_cast<double>(step + 1); now += 1.0) {
      report(now, step);
      EXPECT_FALSE(watch_.find(now));
    }
  }
  constexpr double kHalf = 0.5;
  double now = 83.0;
  std::optional<Failure> found;
  while (!found && now < 110.0) {
    now += kHalf;
    for (RankReport& rank : ranks_) {
      rank.section_seconds = now - 80.0;
      watch_.report(node(rank.rank), {rank}, now);
    }
    found = watch_.find(now);
  }
  ASSERT_TRUE(found);
  EXPECT_NEAR(now, 92.5, kHalf + 0.01);
}

}  // namespace
}  // namespace tessera
