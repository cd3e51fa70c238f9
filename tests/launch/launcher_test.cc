// Tests the launcher with real monitors on this machine. Shell scripts stand in for ranks.
#include "launch/launcher.h"

#include <gmock/gmock.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <fstream>
#include <functional>
#include <thread>

#include "base/unix_time.h"
#include "checkpoint/checkpoint.h"
#include "comm/observe/rank_file.h"
#include "health/verdict.h"
#include "launch/launch_files.h"
#include "launch/launch_state.h"
#include "run/state/replica_check.h"
#include "tests/data/support.h"
#include "tests/log_of.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

struct Script {
  std::vector<std::string> nodes = {"n1"};
  std::vector<std::string> ranks = {};        // shell commands for the ranks of each attempt; "$@" is their program
  std::string monitor_of_n1 = "exec \"$@\"";  // "$@" is the monitor's command
  std::string drain = "true";
  std::function<void(std::size_t)> before_ranks = [](std::size_t) {};  // receives the index of the attempt
  std::string job = {};                                                // of the scheduler
};

class ScriptEngine : public Engine {
 public:
  explicit ScriptEngine(Script script) : script_(std::move(script)) {}

  std::string name() const override { return "script"; }
  std::vector<std::string> nodes() const override { return script_.nodes; }
  bool is_one_machine() const override { return true; }
  std::string job() const override { return script_.job; }
  CommandLine on_node(const std::string& node, const CommandLine& program) const override {
    CommandLine command = {"sh", "-c", node == "n1" ? script_.monitor_of_n1 : "exec \"$@\"", "sh"};
    command.insert(command.end(), program.begin(), program.end());
    command.back() += "-" + node;  // gives each node its own folder, since they share one machine
    return command;
  }
  CommandLine on_ranks(const std::vector<std::string>&, int, const std::vector<std::string>&,
                       const CommandLine& program) const override {
    script_.before_ranks(attempt_);
    CommandLine command = {"sh", "-c", script_.ranks.at(attempt_++), "sh"};
    command.insert(command.end(), program.begin(), program.end());
    return command;
  }
  std::optional<CommandLine> drain(const std::string&, const std::string&) const override {
    return CommandLine{"sh", "-c", script_.drain};
  }

 private:
  Script script_;
  mutable std::size_t attempt_ = 0;
};

class LauncherTest : public ::testing::Test {
 protected:
  LauncherTest() {
    config_.job.dump_folder = run_;
    config_.job.run_id = "run-" + std::to_string(getpid());  // unique, because tests run beside each other
    options_.node_folder = scratch_ / "node";
    options_.program = TESSERA_BINARY;
  }

  /// Launches a run with this script. Returns the exit status, and leaves the log in log_.
  int run(const Script& script) {
    int status = -1;
    log_ = log_of([&] { status = launch(options_, config_, std::make_unique<ScriptEngine>(script), stop_); });
    return status;
  }
  nlohmann::json incident(int number) const {
    return nlohmann::json::parse(read_text_file(run_ / kIncidentsFolderName / (std::to_string(number) + ".json")));
  }

  const data::TemporaryFolder scratch_;
  const std::filesystem::path run_ = scratch_ / "run";
  std::string log_;
  LauncherOptions options_;
  JobConfig config_;
  volatile StopRequest stop_;
};

TEST_F(LauncherTest, AFailureBeforeTheRunHasHealedEndsTheFirstIncident) {
  options_.restarts_per_hour = 1;
  EXPECT_EQ(run({.ranks = {"exit 1", "exit 1"}}), static_cast<int>(ExitStatus::kHold));
  const auto first = incident(1), second = incident(2);
  const double seconds =
      second.at("time_of_fault_noticed").get<double>() - first.at("time_of_fault_noticed").get<double>();
  ASSERT_TRUE(first.at("seconds_lost").is_number()) << first;
  EXPECT_NEAR(first.at("seconds_lost").get<double>(), seconds, 1e-3);
  EXPECT_NEAR(read_launch_state(run_)->seconds_lost, seconds, 1e-3);
  EXPECT_TRUE(first.at("resumed_step").is_null());
  EXPECT_THAT(first.at("text").get<std::string>(), HasSubstr("failed again before it trained"));
  EXPECT_TRUE(second.at("seconds_lost").is_null());
  EXPECT_THAT(log_, HasSubstr("stopped: there were 1 restarts"));
}

/// A launch with checkpoint.load_step=15, and later checkpoints of another one.
class LaunchWithLoadStep : public LauncherTest {
 protected:
  LaunchWithLoadStep() {
    config_.checkpoint.enable = true;
    config_.checkpoint.load_step = 15;
    options_.arguments = {"--checkpoint.load_step=15"};
    for (const std::int64_t step : {15, 30}) save(step, "old");
  }
  void save(std::int64_t step, const std::string& content) {
    data::write_file(checkpoint_path(run_ / config_.checkpoint.folder, step) / kCheckpointManifestName, content);
  }
  /// Returns a command for ranks that notes their program, and does `then`.
  std::string noting(const std::string& then) const {
    return fmt::format("echo \"$@\" >> {}; {}", (scratch_ / "programs").string(), then);
  }
  /// Returns the last checkpoint.load_step that each attempt was given.
  std::vector<std::string> load_steps() const {
    std::ifstream programs(scratch_ / "programs");
    std::vector<std::string> steps;
    for (std::string line; std::getline(programs, line);) {
      constexpr std::string_view kKey = "load_step=";
      const std::string step = line.substr(line.rfind(kKey) + kKey.size());
      steps.push_back(step.substr(0, step.find(' ')));
    }
    return steps;
  }
};

/// checkpoint.load_step is for the first attempt. If restarts began there, too, all steps since would be lost.
TEST_F(LaunchWithLoadStep, ARestartGoesOnFromWhatTheLaunchHasSaved) {
  const auto save_once = [&](std::size_t attempt) {
    if (attempt == 0) save(20, "new");
  };
  EXPECT_EQ(run({.ranks = {noting("exit 1"), noting("exit 0")}, .before_ranks = save_once}), 0) << log_;
  EXPECT_THAT(load_steps(), ElementsAre("15", "20"));
}

/// Copies in memory that an earlier launch has left may be of later steps. They are there until the first step.
TEST_F(LaunchWithLoadStep, UntilItHasTrainedARestartBeginsThereAgain) {
  fs::remove_all(checkpoint_path(run_ / config_.checkpoint.folder, 30));
  std::optional<RankFile> file;
  const auto train_in_second = [&](std::size_t attempt) {
    if (attempt != 1) return;
    RankEntry& entry = file.emplace(scratch_ / "node-n1", 2, 0).entry();
    entry.first_step = entry.step = 16;
    entry.section = Section::kStep;
  };
  const Script script{.ranks = {noting("exit 1"), noting("sleep 1; exit 1"), noting("exit 0")},
                      .before_ranks = train_in_second};
  EXPECT_EQ(run(script), 0) << log_;
  EXPECT_THAT(load_steps(), ElementsAre("15", "15", "-1"));
}

/// The launcher may be unable to read what was saved.
TEST_F(LaunchWithLoadStep, ARestartThatCannotBeStartedIsAFailure) {
  options_.restarts_per_hour = 1;
  const auto break_manifest = [&](std::size_t) {
    const fs::path manifest = checkpoint_path(run_ / config_.checkpoint.folder, 30) / kCheckpointManifestName;
    fs::remove(manifest);
    fs::create_directory(manifest);
  };
  const int status = run({.ranks = {noting("exit 1")}, .before_ranks = break_manifest});
  EXPECT_EQ(status, static_cast<int>(ExitStatus::kHold)) << log_;
  EXPECT_THAT(incident(2).at("text").get<std::string>(), HasSubstr("the ranks could not be started: cannot read"));
}

/// The scheduler stops a job and starts it again with the same command. A person may start that command anew.
TEST_F(LaunchWithLoadStep, ARequeuedJobGoesOnFromWhatItHasSaved) {
  const auto save_and_stop = [&](std::size_t) {
    save(20, "new");
    note_signal(stop_, SIGTERM);
  };
  const std::string ends = noting("exit 0");
  EXPECT_EQ(run({.ranks = {noting("exec sleep 100")}, .before_ranks = save_and_stop, .job = "4711"}), 128 + SIGTERM);
  stop_.count = 0;
  setenv("SLURM_RESTART_COUNT", "1", 1);
  EXPECT_EQ(run({.ranks = {ends}, .job = "4711"}), 0) << log_;
  EXPECT_EQ(run({.ranks = {ends}, .job = "4711"}), 0) << log_;  // a second launch in the same job
  unsetenv("SLURM_RESTART_COUNT");
  EXPECT_EQ(run({.ranks = {ends}, .job = "4712"}), 0) << log_;
  EXPECT_THAT(load_steps(), ElementsAre("15", "20", "15", "15"));
}

TEST_F(LaunchWithLoadStep, AfterALostLauncherTheNextGoesOn) {
  EXPECT_EQ(run({.ranks = {noting("exit 0")}}), 0) << log_;
  save(20, "new");
  LaunchState lost = read_launch_state(run_).value();
  lost.state = "training";
  lost.exit_status.reset();
  data::write_file(run_ / kLaunchStateName, to_json(lost).dump());
  EXPECT_EQ(run({.ranks = {noting("exit 0")}}), 0) << log_;
  EXPECT_THAT(load_steps(), ElementsAre("15", "20"));
}

/// Another launcher uses the files of the run, and the memory of its nodes, by then.
TEST_F(LauncherTest, ALauncherWhoseRunWasTakenOverLeavesItAlone) {
  const fs::path copy = scratch_ / "node-n1" / "copy";
  const auto put_copy = [&](std::size_t) { data::write_file(copy, "of a state"); };
  EXPECT_EQ(run({.ranks = {"exit 73"}, .before_ranks = put_copy}), static_cast<int>(ExitStatus::kTakenOver)) << log_;
  EXPECT_TRUE(fs::exists(copy));
  EXPECT_EQ(read_launch_state(run_)->state, "recovering");
  EXPECT_FALSE(read_launch_state(run_)->exit_status);
}

TEST_F(LauncherTest, ASignalThatStopsAHealingRunIsTheReasonOfItsEnd) {
  const auto stop_second = [&](std::size_t attempt) {
    if (attempt == 1) note_signal(stop_, SIGTERM);
  };
  EXPECT_EQ(run({.ranks = {"exit 1", "exec sleep 100"}, .before_ranks = stop_second}), 128 + SIGTERM);
  EXPECT_THAT(log_, HasSubstr("stopped by signal 15"));
  EXPECT_THAT(log_, Not(HasSubstr("stopped: ")));
}

/// A launch whose ranks had begun step 5 when they failed. In the second attempt they begin a step once they wait in
/// `script`, which creates READY when it does. Signals arrive before that.
class StoppedWhileItHeals : public LauncherTest {
 protected:
  int run_second(const std::string& script, int num_signals) {
    std::optional<RankFile> files[2];
    std::jthread trains;
    const auto prepare = [&](std::size_t attempt) {
      RankEntry& entry = files[attempt].emplace(scratch_ / "node-n1", attempt + 1, 0).entry();
      const auto begin_step = [&entry](std::int64_t step) {
        entry.first_step = step;
        entry.step = step;
        entry.section = Section::kStep;
      };
      if (attempt == 0) return begin_step(5);
      for (int i = 0; i < num_signals; ++i) note_signal(stop_, SIGTERM);
      trains = std::jthread([this, begin_step](const std::stop_token& stop) {
        while (!fs::exists(scratch_ / "READY") && !stop.stop_requested()) {
          std::this_thread::sleep_for(std::chrono::milliseconds(10));
        }
        begin_step(6);
      });
    };
    return run({.ranks = {"sleep 1; exit 1", fmt::format("cd {}; {}", scratch_.path().string(), script)},
                .before_ranks = prepare});
  }
};

/// mpirun and srun pass no signal to ranks that they have not started yet. It would be lost, and so would be the steps
/// that only copies in memory have.
TEST_F(StoppedWhileItHeals, TheRanksAreToldToSaveOnceTheyTrain) {
  EXPECT_EQ(run_second("trap 'echo > SAVED; exit 138' USR1; echo > READY; while :; do sleep 0.1; done", 1),
            128 + SIGTERM);
  EXPECT_TRUE(fs::exists(scratch_ / "SAVED")) << log_;
}

/// The signal arrives after the ranks have ended, and before the next attempt.
TEST_F(LauncherTest, ASignalWhileItHealsWaitsForTheNextAttempt) {
  std::optional<RankFile> files[2];
  std::jthread stops;
  const auto prepare = [&](std::size_t attempt) {
    RankEntry& entry = files[attempt].emplace(scratch_ / "node-n1", attempt + 1, 0).entry();
    entry.first_step = entry.step = 5;
    entry.section = Section::kStep;
    if (attempt > 0) return;
    stops = std::jthread([this](const std::stop_token& stop) {
      while (!fs::exists(scratch_ / "ENDED") && !stop.stop_requested()) {
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      }
      note_signal(stop_, SIGTERM);
    });
  };
  const std::string folder = scratch_.path().string();
  const Script script{
      .ranks = {fmt::format("sleep 1; echo > {}/ENDED; exit 1", folder),
                fmt::format("trap 'echo > {}/SAVED; exit 138' USR1; while :; do sleep 0.1; done", folder)},
      .before_ranks = prepare};
  EXPECT_EQ(run(script), 128 + SIGTERM);
  EXPECT_TRUE(fs::exists(scratch_ / "SAVED")) << log_;
}

/// What the wait in the scheduler's queue has cost is no training.
TEST_F(LauncherTest, TheTimeOfARequeueIsLost) {
  LaunchState before{.run_id = config_.job.run_id, .attempt = 1, .state = "stopped"};
  before.step = 5;
  before.incidents = 1;
  before.seconds_lost = 10.0;
  before.begin = unix_time() - 200.0;
  before.time = unix_time() - 100.0;
  before.exit_status = static_cast<int>(ExitStatus::kRequeue);
  data::write_file(run_ / kLaunchStateName, to_json(before).dump());
  std::optional<RankFile> file;
  const auto prepare = [&](std::size_t) {
    RankEntry& entry = file.emplace(scratch_ / "node-n1", 2, 0).entry();
    entry.first_step = entry.step = 5;
    entry.section = Section::kStep;
  };
  EXPECT_EQ(run({.ranks = {"sleep 2"}, .before_ranks = prepare}), 0) << log_;
  EXPECT_EQ(read_launch_state(run_)->incidents, 1);
  EXPECT_GE(read_launch_state(run_)->seconds_lost, 110.0);
  EXPECT_LT(read_launch_state(run_)->seconds_lost, 140.0);
}

TEST_F(StoppedWhileItHeals, ASecondSignalEndsItAtOnce) {
  EXPECT_EQ(run_second("trap '' USR1; echo > READY; while :; do sleep 0.1; done", 2), 128 + SIGTERM) << log_;
}

TEST_F(StoppedWhileItHeals, ARunThatIsDoneIsNotStopped) {
  EXPECT_EQ(run_second("trap '' USR1; echo > READY; sleep 1", 1), 0) << log_;
  EXPECT_EQ(read_launch_state(run_)->state, "done");
}

TEST_F(LauncherTest, ASignalBeforeTheFirstStepEndsTheRunAtOnce) {
  const auto stop = [&](std::size_t) { note_signal(stop_, SIGTERM); };
  EXPECT_EQ(run({.ranks = {"exec sleep 100"}, .before_ranks = stop}), 128 + SIGTERM);
  EXPECT_THAT(log_, HasSubstr("no step has begun, so there is nothing to save"));
  EXPECT_EQ(read_launch_state(run_)->incidents, 0);
}

TEST_F(LauncherTest, AStarterThatOutlivesItsRanksIsKilled) {
  config_.comm.init_timeout_seconds = 1;
  std::optional<RankFile> file;
  const auto end_rank = [&](std::size_t) {
    RankEntry& entry = file.emplace(scratch_ / "node-n1", 1, 0).entry();
    entry.exit_status = 0;
    entry.section = Section::kEnded;
  };
  EXPECT_EQ(run({.ranks = {"exec sleep 100"}, .before_ranks = end_rank}), 0) << log_;
  EXPECT_THAT(log_, HasSubstr("all ranks have done what they should"));
}

class NodesThatAreAway : public LauncherTest {
 protected:
  NodesThatAreAway() {
    const LaunchState before{.run_id = config_.job.run_id, .attempt = 3, .state = "training"};
    data::write_file(run_ / kLaunchStateName, to_json(before).dump());
  }
};

TEST_F(NodesThatAreAway, AreMissedByARunThatGoesOnOnlyIfTheyAreNeeded) {
  options_.num_spares = 1;
  EXPECT_EQ(run({.nodes = {"n1", "n2"}, .ranks = {"exit 0"}, .monitor_of_n1 = "exit 1"}), 0) << log_;
  EXPECT_THAT(log_, HasSubstr("goes on without nodes that are not fit yet:\n  n1: its monitor ended with status 1"));
  EXPECT_EQ(read_launch_state(run_)->nodes.at(1).role, "active");
}

// The next launch of this run may reach the node. Status 2 would say that it cannot.
TEST_F(NodesThatAreAway, AreNoWrongInputOfARunThatGoesOn) {
  options_.num_nodes = 2;
  try {
    run({.nodes = {"n1", "n2"}, .ranks = {"exit 0"}, .monitor_of_n1 = "exit 1"});
    FAIL() << "it began";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), ExitStatus::kProgramError) << error.what();
  }
  EXPECT_FALSE(read_launch_state(run_)->has_ended());
}

TEST_F(LauncherTest, ADamagedStateIsToldOfWithItsRemedy) {
  data::write_file(run_ / kLaunchStateName, "");
  expect_error([&] { run({.ranks = {"exit 0"}}); }, {"launch.json", "move the file away"});
}

TEST_F(LauncherTest, NodesThatNobodyNeedsAreToldOf) {
  EXPECT_EQ(run({.nodes = {"n1", "n2", "n3"}, .ranks = {"exit 0"}}), 0) << log_;
  EXPECT_THAT(log_, HasSubstr("2 of 3 nodes are left out: --nodes 1 and --spares 0 need no more"));
}

/// A scheduler that preempts a job sends a signal at any time. Status 2 would say that the command cannot work.
TEST_F(LauncherTest, ASignalBeforeTheRanksStartHasItsOwnStatus) {
  note_signal(stop_, SIGTERM);
  const auto launch_it = [&] { launch(options_, config_, std::make_unique<ScriptEngine>(Script{}), stop_); };
  try {
    launch_it();
    FAIL() << "it was not stopped";
  } catch (const Error& error) {
    EXPECT_EQ(static_cast<int>(error.status()), 128 + SIGTERM) << error.what();
  }
  EXPECT_EQ(read_launch_state(run_)->exit_status, 128 + SIGTERM);
}

TEST_F(LauncherTest, TheSchedulersCommandsAreReaped) {
  options_.num_spares = 1;
  const std::string folder = scratch_.path().string(), monitor = folder + "/monitor.pid", drain = folder + "/drain.pid";
  // n1 is lost: its monitor is killed, and no other monitor can be started there.
  const Script script{.nodes = {"n1", "n2"},
                      .ranks = {fmt::format("sleep 0.5; kill -9 $(cat {}); exec sleep 100", monitor), "exec sleep 1"},
                      .monitor_of_n1 = fmt::format("[ -e {0} ] && exit 1; echo $$ > {0}; exec \"$@\"", monitor),
                      .drain = "echo $$ > " + drain};
  EXPECT_EQ(run(script), 0) << log_;
  pid_t process = 0;
  std::ifstream(drain) >> process;
  ASSERT_GT(process, 0);
  EXPECT_EQ(kill(process, 0), -1);
  EXPECT_EQ(errno, ESRCH);
}

TEST_F(LauncherTest, AReplayBlamesTheNodeThatHadTheWrongState) {
  options_.num_spares = 1;
  options_.ranks_per_node = 2;
  const std::string monitor = (scratch_ / "monitor.pid").string();
  const auto tell_of_replay = [&](std::size_t attempt) {
    if (attempt != 2) return;
    data::write_file(run_ / kMismatchesName, R"({"step": 7, "attempt": 3, "wrong_ranks": [1]})"
                                             "\n");
  };
  // Replicas differ on n1. Before a replay can show whose state was wrong, n1 is lost, and n2 takes its place.
  const Script script{.nodes = {"n1", "n2"},
                      .ranks = {"exit 72", fmt::format("kill -9 $(cat {}); exec sleep 100", monitor), "exec sleep 2"},
                      .monitor_of_n1 = fmt::format("[ -e {0} ] && exit 1; echo $$ > {0}; exec \"$@\"", monitor),
                      .before_ranks = tell_of_replay};
  EXPECT_EQ(run(script), 0) << log_;
  EXPECT_THAT(log_, HasSubstr("gives another state than rank 1 on n1 had; it trains no more"));
  EXPECT_EQ(incident(1).at("blamed").at("node"), "n1");
  EXPECT_EQ(read_launch_state(run_)->nodes.at(1).role, "active");
}

class SickNodes : public LauncherTest {
 protected:
  SickNodes() { options_.health_folder = scratch_ / "health"; }

  /// Writes a verdict of n1's daemon. All nodes here see one folder, and n2 must not take the verdict for its own.
  void judge(HealthLevel level, double active_check = 0.0) const {
    const std::string reason = level == HealthLevel::kBad ? "[node_problem] gpuXid: GPU 3: XID 79" : "";
    fs::create_directories(options_.health_folder);
    write_verdict(options_.health_folder,
                  {.node = "n1", .time = unix_time(), .level = level, .reason = reason, .active_check = active_check});
  }
};

TEST_F(SickNodes, AreLeftOutAtTheStart) {
  options_.num_spares = 1;
  judge(HealthLevel::kBad);
  EXPECT_EQ(run({.nodes = {"n1", "n2"}, .ranks = {"exit 0"}}), 0) << log_;
  EXPECT_THAT(log_, HasSubstr("n1: [node_problem] gpuXid: GPU 3: XID 79"));
  const std::vector<LaunchState::Node> nodes = read_launch_state(run_)->nodes;
  EXPECT_EQ(nodes.at(0).role, "drained");
  EXPECT_EQ(nodes.at(1).role, "active");
}

TEST_F(SickNodes, ComeBackWhenAnOperatorAsks) {
  options_.num_spares = 1;
  judge(HealthLevel::kBad);
  const auto ask = [&](std::size_t) { data::write_file(run_ / "launch_requests" / "n1.undrain", ""); };
  EXPECT_EQ(run({.nodes = {"n1", "n2"}, .ranks = {"sleep 4"}, .before_ranks = ask}), 0) << log_;
  EXPECT_THAT(log_, HasSubstr("n1 was returned by tessera undrain"));
  EXPECT_EQ(read_launch_state(run_)->nodes.at(0).role, "spare");
}

// Without copies in memory of this attempt, a restart would lose more than it saves.
TEST_F(SickNodes, AreKeptUntilTheRanksTrain) {
  options_.num_spares = 1;
  const auto sicken = [&](std::size_t) { judge(HealthLevel::kBad); };
  EXPECT_EQ(run({.nodes = {"n1", "n2"}, .ranks = {"sleep 4"}, .before_ranks = sicken}), 0) << log_;
  EXPECT_EQ(read_launch_state(run_)->incidents, 0);
  EXPECT_EQ(read_launch_state(run_)->nodes.at(0).role, "active");
}

TEST_F(SickNodes, TooFewThatAreWellIsAnError) {
  judge(HealthLevel::kBad);
  expect_error([&] { run({.nodes = {"n1"}, .ranks = {"exit 0"}}); }, {"0 of 1 nodes are well", "XID 79"});
  EXPECT_EQ(read_launch_state(run_)->state, "stopped");
  EXPECT_EQ(read_launch_state(run_)->exit_status, static_cast<int>(ExitStatus::kWrongInput));
  EXPECT_FALSE(fs::exists(options_.node_folder.string() + "-n1"));
}

TEST_F(SickNodes, LeaveTheCopiesInMemoryToTheNextLaunch) {
  const LaunchState before{.run_id = config_.job.run_id, .attempt = 3, .state = "training"};
  data::write_file(run_ / kLaunchStateName, to_json(before).dump());
  judge(HealthLevel::kBad);
  expect_error([&] { run({.nodes = {"n1"}, .ranks = {"exit 0"}}); }, {"0 of 1 nodes are well"});
  EXPECT_FALSE(read_launch_state(run_)->has_ended());
  EXPECT_TRUE(fs::exists(options_.node_folder.string() + "-n1"));
}

TEST_F(SickNodes, AVerdictThatIsOldSaysNothing) {
  judge(HealthLevel::kBad);
  write_verdict(options_.health_folder, {.node = "n1", .time = unix_time() - 100.0, .level = HealthLevel::kBad});
  EXPECT_EQ(run({.nodes = {"n1"}, .ranks = {"exit 0"}}), 0) << log_;
}

TEST_F(SickNodes, ComeBackAfterTheirActiveCheck) {
  options_.num_spares = 1;
  judge(HealthLevel::kBad);
  const auto heal = [&](std::size_t) { judge(HealthLevel::kOk, unix_time()); };
  EXPECT_EQ(run({.nodes = {"n1", "n2"}, .ranks = {"sleep 3"}, .before_ranks = heal}), 0) << log_;
  EXPECT_THAT(log_, HasSubstr("n1 has passed its active check"));
  EXPECT_EQ(read_launch_state(run_)->nodes.at(0).role, "spare");
}

// A daemon that was started anew knows of no fault, and of no check.
TEST_F(SickNodes, DoNotComeBackBecauseTheirDaemonForgot) {
  options_.num_spares = 1;
  judge(HealthLevel::kBad);
  const auto forget = [&](std::size_t) { judge(HealthLevel::kOk); };
  EXPECT_EQ(run({.nodes = {"n1", "n2"}, .ranks = {"sleep 3"}, .before_ranks = forget}), 0) << log_;
  EXPECT_EQ(read_launch_state(run_)->nodes.at(0).role, "drained");
}

}  // namespace
}  // namespace tessera
