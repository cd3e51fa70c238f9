#include "launch/launcher_watch.h"

#include <gmock/gmock.h>

namespace tessera {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

/// Watches the launcher of job 7 on n1. A test lets this launcher write or be silent.
class LauncherWatchTest : public ::testing::Test {
 protected:
  /// Looks twice a second for so many seconds at a launcher that writes before each look or not at all. Returns what
  /// was new.
  std::string pass(double seconds, bool writes) {
    std::string news;
    for (const double end = now_ + seconds; now_ < end;) {
      now_ += 0.5;
      if (writes) state_.time += 0.5;
      news += watch_.look(state_, now_);
    }
    return news;
  }
  /// Begins to watch a launcher that writes and answers.
  void begin() {
    pass(3.0, true);
    ASSERT_TRUE(watch_.wants_contact());
    watch_.set_reachable(true);
  }
  SlurmJob running(int restarts = 0) const { return {.state = "RUNNING", .restarts = restarts, .host = "n1"}; }
  LauncherWatch::Verdict judge(const SlurmJob& job, bool answers = false) { return watch_.judge(job, answers, now_); }
  /// Requeues the job. Its new launcher writes and can be reached.
  void start_again() {
    ++state_.job->restarts;
    state_.endpoint += '1';
    pass(3.0, true);
    watch_.set_reachable(true);
  }

  LauncherWatch watch_{{.silent_seconds = 10.0, .requeues_per_hour = 2}};
  LaunchState state_{.run_id = "r",
                     .state = "training",
                     .host = "n1",
                     .engine = "slurm",
                     .endpoint = "tcp://n1:4711",
                     .job = LaunchState::Job{.id = "7", .restarts = 0},
                     .time = 1e9};
  double now_ = 0.0;
};

TEST_F(LauncherWatchTest, ALauncherThatWritesIsNotSuspected) {
  EXPECT_THAT(pass(3.0, true), HasSubstr("run r: training"));
  EXPECT_THAT(pass(3600.0, true), IsEmpty());
  EXPECT_FALSE(watch_.is_suspect());
  EXPECT_FALSE(watch_.is_over());
}

TEST_F(LauncherWatchTest, OneThatIsSilentAndDoesNotAnswerIsRequeuedOnce) {
  begin();
  pass(9.5, false);
  EXPECT_FALSE(watch_.is_suspect());
  pass(0.5, false);
  EXPECT_TRUE(watch_.is_suspect());
  const auto verdict = judge(running());
  EXPECT_TRUE(verdict.requeue);
  EXPECT_THAT(verdict.text, HasSubstr("on n1 has written nothing for 10 s"));
  // The job is not requeued again until its new launcher writes, whoever requeued it and whatever its state is.
  for (const char* state : {"COMPLETING", "PENDING", "RUNNING"}) {
    pass(3600.0, false);
    const auto later = judge({.state = state, .restarts = 1, .host = "n2", .host_is_down = true});
    EXPECT_FALSE(later.requeue) << state;
    EXPECT_THAT(later.text, HasSubstr("job 7 (Restarts=1) is " + std::string(state)));
  }
  start_again();
  EXPECT_FALSE(watch_.is_suspect());
  pass(10.0, false);
  EXPECT_TRUE(judge(running(1)).requeue);
}

TEST_F(LauncherWatchTest, ARequeueThatSlurmHasNotMadeIsAskedForAgain) {
  begin();
  pass(10.0, false);
  const auto first = judge(running());
  EXPECT_TRUE(first.requeue);
  EXPECT_FALSE(first.again);
  for (int i = 0; i < 3; ++i) {  // more often than the limit of an hour
    pass(10.0, false);
    EXPECT_FALSE(judge(running(), true).requeue);
    const auto next = judge(running());
    EXPECT_TRUE(next.requeue);
    EXPECT_TRUE(next.again);
    EXPECT_THAT(next.text, IsEmpty());
  }
  start_again();
  pass(10.0, false);
  const auto of_next_launcher = judge(running(1));
  EXPECT_TRUE(of_next_launcher.requeue);
  EXPECT_FALSE(of_next_launcher.again);
}

TEST_F(LauncherWatchTest, StorageThatHangsIsNoLostLauncher) {
  begin();
  pass(60.0, false);
  const auto verdict = judge(running(), true);
  EXPECT_FALSE(verdict.requeue);
  EXPECT_THAT(verdict.text, HasSubstr("but it answers"));
  EXPECT_THAT(pass(2.0, true), HasSubstr("run r: training"));
  EXPECT_FALSE(watch_.is_suspect());
  // Here the watcher itself could not read the state.
  now_ += 3600.0;
  watch_.look(state_, now_);
  EXPECT_FALSE(watch_.is_suspect());
}

TEST_F(LauncherWatchTest, TheClockOfTheLauncherDoesNotMatter) {
  begin();
  for (int i = 0; i < 60; ++i) {
    state_.time -= 100.0;
    watch_.look(state_, now_ += 1.0);
  }
  EXPECT_FALSE(watch_.is_suspect());
}

TEST_F(LauncherWatchTest, OneThatWasNeverReachedIsLostWhenSlurmSaysSo) {
  pass(3.0, true);
  watch_.set_reachable(false);
  pass(10.0, false);
  const auto unknown = judge(running());
  EXPECT_FALSE(unknown.requeue);
  EXPECT_THAT(unknown.text, HasSubstr("If it is lost: scontrol requeue 7"));
  SlurmJob down = running();
  down.host_is_down = true;
  EXPECT_TRUE(judge(down).requeue);
}

TEST_F(LauncherWatchTest, ALauncherThatWasLostBeforeTheWatchBeganIsFound) {
  pass(20.0, false);
  EXPECT_FALSE(watch_.wants_contact());
  ASSERT_TRUE(watch_.is_suspect());
  SlurmJob down = running();
  down.host_is_down = true;
  EXPECT_TRUE(judge(down).requeue);
}

TEST_F(LauncherWatchTest, AJobThatDoesNotRunIsNotRequeued) {
  begin();
  pass(10.0, false);
  EXPECT_FALSE(judge({.state = "SUSPENDED"}).requeue);
  EXPECT_FALSE(watch_.is_over());
  const auto verdict = judge({.state = "CANCELLED"});
  EXPECT_FALSE(verdict.requeue);
  EXPECT_THAT(verdict.text, HasSubstr("job 7 is CANCELLED, but the run has not ended"));
  EXPECT_TRUE(watch_.is_over());
}

TEST_F(LauncherWatchTest, RequeuesPerHourAreLimited) {
  begin();
  for (int i = 0; i < 2; ++i) {
    pass(10.0, false);
    ASSERT_TRUE(judge(running(i)).requeue);
    start_again();
  }
  pass(10.0, false);
  const auto verdict = judge(running(2));
  EXPECT_FALSE(verdict.requeue);
  EXPECT_THAT(verdict.text, HasSubstr("was requeued 2 times within an hour"));
  pass(3600.0, false);
  EXPECT_TRUE(judge(running(2)).requeue);
}

TEST_F(LauncherWatchTest, OneThatHasStoppedIsOverWhenItsJobIs) {
  begin();
  state_.state = "stopped";
  pass(0.5, true);
  EXPECT_TRUE(watch_.is_suspect());
  for (const auto& [state, restarts] : {std::pair{"RUNNING", 0}, {"COMPLETING", 0}, {"PENDING", 1}, {"RUNNING", 1}}) {
    pass(3600.0, false);
    EXPECT_FALSE(judge({.state = state, .restarts = restarts, .host = "n1", .host_is_down = true}).requeue) << state;
    EXPECT_FALSE(watch_.is_over());  // the job may start again, as after `scontrol requeue` or exit status 75
  }
  EXPECT_THAT(judge({.state = "SPECIAL_EXIT"}).text, HasSubstr("run r has stopped, job 7 is SPECIAL_EXIT"));
  EXPECT_TRUE(watch_.is_over());
}

TEST_F(LauncherWatchTest, ARunThatHasEndedIsOver) {
  begin();
  state_.state = "done";
  EXPECT_THAT(pass(0.5, true), HasSubstr("run r has ended: done"));
  EXPECT_TRUE(watch_.is_over());
}

}  // namespace
}  // namespace tessera
