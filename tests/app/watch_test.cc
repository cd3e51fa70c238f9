// Tests `tessera watch` with a scontrol that a test writes, and how `tessera launch` treats the loss of a launcher.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include "launch/launch_files.h"
#include "launch/launch_state.h"
#include "tests/app/process.h"
#include "tests/data/support.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using app_test::Finished;
using app_test::Process;
using data::TemporaryFolder;
using data::write_file;
using ::testing::HasSubstr;
using ::testing::Not;

class WatchTest : public ::testing::Test {
 protected:
  WatchTest() { fs::create_directory(run_); }

  void write_state(const LaunchState& state) const { write_file(run_ / kLaunchStateName, to_json(state).dump()); }
  /// Writes a shell script that takes the place of scontrol. $2 is "show" in `-o show job 7`, and the job in
  /// `requeue 7`.
  void write_scontrol(const std::string& script) const { app_test::write_script(scratch_ / "bin/scontrol", script); }
  Process watch(const std::vector<std::string>& folders) const {
    std::vector<std::string> arguments = {"watch", "--silent=1"};
    arguments.insert(arguments.end(), folders.begin(), folders.end());
    return Process(scratch_, arguments, RLIM_INFINITY,
                   {"/usr/bin/env", "PATH=" + (scratch_ / "bin").string() + ":/usr/bin:/bin"});
  }

  TemporaryFolder scratch_;
  fs::path run_ = scratch_ / "outputs";  // the output folder of app_test::small_run
  /// The state that a launcher left behind. Nobody can reach this launcher any more.
  LaunchState lost_{.run_id = "r",
                    .attempt = 1,
                    .state = "training",
                    .host = "n1",
                    .engine = "slurm",
                    .endpoint = "tcp://127.0.0.1:1",
                    .job = LaunchState::Job{.id = "7", .restarts = 0},
                    .time = 1e9,
                    .begin = 1e9,
                    .step = 2,
                    .num_steps = 4};
};

TEST_F(WatchTest, AJobWhoseBatchHostIsDownIsRequeued) {
  write_state(lost_);
  const std::string requeued = (scratch_ / "requeued").string();
  write_scontrol("if [ $1 = requeue ]; then echo $2 >> " + requeued + "; exit; fi\nif [ \"$3\" = node ]; then echo " +
                 "NodeName=n1 State=DOWN; exit; fi\n[ -e " + requeued + " ] && restarts=1\n" +
                 "echo JobState=RUNNING Restarts=${restarts:-0} BatchHost=n1\n");
  const Process process = watch({run_.string()});
  process.wait_for_output("and Slurm says that n1 is down: job 7 is requeued");
  process.wait_for_output("job 7 (Restarts=1) is RUNNING: waiting for its launcher");
  EXPECT_TRUE(read_launcher_loss(run_, lost_));
  LaunchState next = lost_;
  next.time += 60.0;
  next.state = "done";
  next.exit_status = 0;
  write_state(next);
  const Finished finished = process.finish();
  EXPECT_EQ(finished.status, 0) << finished.output;
  EXPECT_THAT(finished.output, HasSubstr("run r has ended: done"));
  EXPECT_EQ(read_text_file(requeued), "7\n");
}

/// Nobody writes to the first run's file, so whoever opens it waits, as for storage that hangs.
TEST_F(WatchTest, ARunWhoseStorageHangsDoesNotDelayAnother) {
  const fs::path hangs = scratch_ / "hangs";
  fs::create_directory(hangs);
  ASSERT_EQ(mkfifo((hangs / kLaunchStateName).c_str(), 0600), 0);
  write_state(lost_);
  write_scontrol("[ \"$3\" = node ] && echo State=UP || echo JobState=COMPLETED Restarts=0 BatchHost=n1\n");
  const Process process = watch({hangs.string(), run_.string()});
  process.wait_for_output("job 7 is COMPLETED");
  process.send(SIGTERM);
  EXPECT_EQ(process.finish().status, 128 + SIGTERM);
}

TEST_F(WatchTest, WhatSlurmRefusesIsSaid) {
  write_state(lost_);
  write_scontrol("case \"$*\" in requeue*) echo requests are disabled; exit 1;; *node*) echo State=DOWN;;\n" +
                 std::string("*) echo JobState=RUNNING Restarts=0 BatchHost=n1;; esac\n"));
  const Process process = watch({run_.string()});
  process.wait_for_output("requests are disabled");
  process.send(SIGTERM);
  EXPECT_EQ(process.finish().status, 128 + SIGTERM);
}

/// A controller that fails over takes no requests for a while. They do not count as requeues.
TEST_F(WatchTest, ARequeueThatSlurmDidNotTakeIsAskedForAgain) {
  write_state(lost_);
  const std::string asked = (scratch_ / "asked").string();
  write_file(asked, "");
  write_scontrol("case \"$*\" in requeue*) echo x >> " + asked + ";; *node*) echo State=DOWN; exit;; esac\n" +
                 "num_asked=$(wc -l < " + asked + ")\ncase \"$*\" in\n" +
                 "requeue*) [ $num_asked -gt 4 ] || { echo the controller is away; exit 1; };;\n" +
                 "*) [ $num_asked -gt 4 ] && restarts=1\n" +
                 "echo JobState=RUNNING Restarts=${restarts:-0} BatchHost=n1;; esac\n");
  const Process process = watch({run_.string()});
  process.wait_for_output("the controller is away");
  process.wait_for_output("job 7 (Restarts=1) is RUNNING: waiting for its launcher");
  process.send(SIGTERM);
  const Finished finished = process.finish();
  EXPECT_THAT(finished.output, Not(HasSubstr("the limit")));
  EXPECT_EQ(read_text_file(asked), "x\nx\nx\nx\nx\n");
}

TEST_F(WatchTest, AJobThatNobodyStartsAgainIsSaidToBe) {
  write_state(lost_);
  write_scontrol("[ $1 = --version ] || { echo slurm_load_jobs error: Invalid job id specified; exit 1; }\n");
  const Finished finished = watch({run_.string()}).finish();
  EXPECT_EQ(finished.status, 1);
  EXPECT_THAT(finished.output, HasSubstr("job 7 is unknown to Slurm, but the run has not ended"));
}

TEST_F(WatchTest, WhatCannotBeWatchedIsSaid) {
  write_scontrol("exit 0\n");
  const auto expect_status_2 = [&](const std::string& folder, const std::string& message) {
    const Finished finished = watch({folder}).finish();
    EXPECT_EQ(finished.status, 2);
    EXPECT_THAT(finished.output, HasSubstr(message));
  };
  expect_status_2((scratch_ / "nothing").string(), "nothing' is no folder: expected that of a run");
  lost_.job.reset();
  lost_.engine = "hosts";
  write_state(lost_);
  expect_status_2(run_.string(), "(engine hosts) runs in no job of Slurm");
  write_scontrol("exit 5\n");
  expect_status_2(run_.string(), "start it on a login node of the cluster");
}

TEST_F(WatchTest, TheNextLaunchHasTheLossAsAnIncident) {
  lost_.job.reset();
  lost_.step = 1;
  write_state(lost_);
  std::vector<std::string> arguments = {"launch", "--node-folder=" + (scratch_ / "tessera-node").string(), "--"};
  data::make_dataset(scratch_, 400, 3000, 0.1);
  const auto training =
      app_test::small_run(scratch_, {"--training.seq_len=32", "--training.local_batch_size=2", "--training.steps=2"});
  arguments.insert(arguments.end(), training.begin(), training.end());
  const Finished finished = Process(scratch_, arguments).finish();
  ASSERT_EQ(finished.status, 0) << finished.output;
  const auto incident = nlohmann::json::parse(read_text_file(run_ / kIncidentsFolderName / "1.json"));
  EXPECT_EQ(incident["kind"], "launcher lost");
  EXPECT_EQ(incident["blamed"]["node"], "n1");
  EXPECT_EQ(incident["resumed_step"], 0);
  EXPECT_GT(incident["seconds_lost"], 3600.0);
  EXPECT_EQ(read_launch_state(run_)->incidents, 1);
  EXPECT_EQ(read_launch_state(run_)->attempt, 2);
}

TEST_F(WatchTest, OnlyARunThatGoesOnDoesWithoutItsSpares) {
  std::vector<std::string> arguments = {"launch",     "--hosts=node.invalid", "--nodes=1",
                                        "--spares=1", "--ranks-per-node=1",   "--"};
  const auto training = app_test::small_run(scratch_, {});
  arguments.insert(arguments.end(), training.begin(), training.end());
  const Finished first = Process(scratch_, arguments).finish();
  EXPECT_EQ(first.status, 2);
  EXPECT_THAT(first.output, HasSubstr("--nodes 1 and --spares 1 need 2 nodes, but the engine hosts has 1"));
  write_state(lost_);
  const Finished next = Process(scratch_, arguments).finish();
  EXPECT_EQ(next.status, 1);  // the host does not exist, but may do so for the next launch
  EXPECT_THAT(next.output, HasSubstr("begins with 0 spares, fewer than --spares 1"));
  EXPECT_THAT(next.output, Not(HasSubstr("need 2 nodes")));
}

}  // namespace
}  // namespace tessera
