#include "launch/watch/monitor.h"

#include <gmock/gmock.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <thread>

#include "base/unix_time.h"
#include "comm/observe/rank_file.h"
#include "launch/watch/channel.h"
#include "launch/watch/protocol.h"
#include "system/child_process.h"
#include "system/file_lock.h"
#include "tests/data/support.h"

namespace tessera {
namespace {

using std::chrono::milliseconds;

/// Runs a monitor in a child process. This process is its launcher.
class MonitorTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(pipe(input_), 0);
    // The fork precedes the launcher's channel, because ZeroMQ starts threads with the first socket of a process.
    monitor_ = fork();
    if (monitor_ == 0) {
      close(input_[1]);
      dup2(input_[0], STDIN_FILENO);
      char key[41] = {};
      int port = 0;
      if (read(STDIN_FILENO, &port, sizeof port) != sizeof port || read(STDIN_FILENO, key, 40) != 40) _exit(9);
      _exit(run_monitor({.node = "n1",
                         .endpoint = "tcp://127.0.0.1:" + std::to_string(port),
                         .key = key,
                         .run_id = run_id_,
                         .folder = scratch_ / "node",
                         .health_folder = scratch_ / "health",
                         .lonely_seconds = 2.0}));
    }
    close(input_[0]);
    launcher_.emplace(true);
    const int port = launcher_->port();
    ASSERT_EQ(write(input_[1], &port, sizeof port), static_cast<ssize_t>(sizeof port));
    ASSERT_EQ(write(input_[1], launcher_->key().data(), 40), 40);
  }
  void TearDown() override {
    if (input_[1] >= 0) close(input_[1]);
    int status = 0;
    waitpid(monitor_, &status, 0);
    EXPECT_EQ(exit_status_of(status), 0);
  }

  /// Returns the first message of a kind that fits. Answers beats meanwhile.
  nlohmann::json hear(const std::string& what, const std::function<bool(const nlohmann::json&)>& fits = {}) {
    for (int i = 0; i < 200; ++i) {
      const auto message = launcher_->receive(milliseconds(50));
      if (!message) continue;
      if (message->body.at("say") == "beat") order({{"do", "watch"}, {"attempt", 1}});
      if (message->body.at("say") == what && (!fits || fits(message->body))) return message->body;
    }
    ADD_FAILURE() << "no " << what;
    return {};
  }
  void order(const nlohmann::json& body) { launcher_->send({"n1", body}); }

  /// Starts a process that sleeps, as a rank of this attempt.
  pid_t start_rank(int attempt) const {
    return spawn("sleep", {"100"},
                 {.variables = {std::string(kAttemptVariable) + "=" + run_id_ + ":" + std::to_string(attempt)}});
  }
  static int status_of(pid_t process) {
    int status = 0;
    waitpid(process, &status, 0);
    return exit_status_of(status);
  }

  const data::TemporaryFolder scratch_;
  // The id is unique: a monitor ends all processes of its run, and tests run beside each other.
  const std::string run_id_ = "run-" + std::to_string(getpid());
  int input_[2] = {-1, -1};
  pid_t monitor_ = 0;
  std::optional<LauncherChannel> launcher_;
};

TEST_F(MonitorTest, TellsWhatRanksDoAndEndsThemWhenItIsTold) {
  EXPECT_FALSE(hear("hello").at("version").get<std::string>().empty());
  RankFile file(scratch_ / "node", 1, 3);  // the file of this process
  file.set_world_size(4);
  const auto beat = hear("beat", [](const nlohmann::json& body) { return !body.at("ranks").empty(); });
  const RankReport report = report_from_json(beat.at("ranks").at(0));
  EXPECT_EQ(report.rank, 3);
  EXPECT_FALSE(report.is_ended);
  EXPECT_EQ(report.section, "starting");

  const pid_t old = start_rank(1), later = start_rank(2);
  order({{"do", "end"}, {"attempt", 1}});
  EXPECT_TRUE(hear("ended").at("left").empty());
  EXPECT_EQ(status_of(old), 128 + SIGKILL);
  EXPECT_EQ(waitpid(later, nullptr, WNOHANG), 0);  // ranks of a later attempt do not end

  order({{"do", "quit"}, {"attempt", 2}});
  hear("quit");
  EXPECT_EQ(status_of(later), 128 + SIGKILL);
  EXPECT_FALSE(std::filesystem::exists(scratch_ / "node"));
}

/// Answers must not make the monitor busy, because the cores belong to the ranks.
TEST_F(MonitorTest, AnswersMakeItReportNoMoreOften) {
  hear("hello");
  int num_beats = 0;
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(2);
  while (std::chrono::steady_clock::now() < end) {
    const auto message = launcher_->receive(milliseconds(10));
    if (!message) continue;
    ++num_beats;
    order({{"do", "watch"}, {"attempt", 1}});
  }
  EXPECT_GE(num_beats, 2);
  EXPECT_LE(num_beats, 2000 / kBetweenBeats.count() + 1);
}

/// A node that nobody can reach has been given up. Its ranks must not go on beside those of the next attempt.
TEST_F(MonitorTest, EndsItsRanksWhenTheLauncherIsSilent) {
  hear("hello");
  hear("beat");
  order({{"do", "watch"}, {"attempt", 1}});
  const pid_t rank = start_rank(1);
  EXPECT_EQ(status_of(rank), 128 + SIGKILL);  // this launcher answers nothing meanwhile
}

/// `scontrol suspend` stops launcher, monitors and ranks. No monitor hears anything until all go on.
TEST_F(MonitorTest, ASuspendedMonitorDoesNotTakeItsLauncherForSilent) {
  hear("hello");
  order({{"do", "watch"}, {"attempt", 1}});
  const pid_t rank = start_rank(1);
  hear("beat", [](const nlohmann::json& body) { return body.at("attempt") == 1; });
  std::this_thread::sleep_for(milliseconds(100));  // the monitor reads the answer meanwhile
  kill(monitor_, SIGSTOP);
  std::this_thread::sleep_for(milliseconds(4000));  // twice lonely_seconds
  kill(monitor_, SIGCONT);
  for (int i = 0; i < 3; ++i) hear("beat");
  EXPECT_EQ(waitpid(rank, nullptr, WNOHANG), 0);
  kill(rank, SIGKILL);
  status_of(rank);
}

/// A launcher that was suspended alone starts the next attempt with the same monitors. The node then has copies that
/// count.
TEST_F(MonitorTest, ANodeThatTakesPartAgainKeepsItsFolder) {
  hear("hello");
  order({{"do", "watch"}, {"attempt", 1}});
  std::this_thread::sleep_for(milliseconds(3000));  // more than lonely_seconds
  order({{"do", "watch"}, {"attempt", 2}});
  hear("beat", [](const nlohmann::json& body) { return body.at("attempt") == 2; });
  close(std::exchange(input_[1], -1));
  siginfo_t info{};
  waitid(P_PID, static_cast<id_t>(monitor_), &info, WEXITED | WNOWAIT);
  EXPECT_TRUE(std::filesystem::exists(scratch_ / "node"));
}

/// A launcher that hangs may be killed by hand later. The next launcher needs the copies.
TEST_F(MonitorTest, ALauncherThatWasSilentBeforeItsConnectionEndedLeavesTheFolder) {
  hear("hello");
  order({{"do", "watch"}, {"attempt", 1}});
  std::this_thread::sleep_for(milliseconds(3000));  // more than lonely_seconds
  close(std::exchange(input_[1], -1));
  std::this_thread::sleep_for(milliseconds(1000));
  EXPECT_TRUE(std::filesystem::exists(scratch_ / "node"));
  const RankFile next(scratch_ / "node", 2, 0);
  const FileLock of_next_monitor(scratch_ / "node" / "monitor.lock", "the node folder",
                                 {.owner = "n1", .takes_over = [](const std::string&) { return true; }});
  siginfo_t info{};
  waitid(P_PID, static_cast<id_t>(monitor_), &info, WEXITED | WNOWAIT);
  EXPECT_TRUE(std::filesystem::exists(scratch_ / "node"));
}

/// The daemon calls this node gpu-7, which is neither the launcher's name for it nor its host name.
class MonitorInPod : public MonitorTest {
 protected:
  void SetUp() override {
    const std::filesystem::path folder = scratch_ / "health";
    std::filesystem::create_directories(folder);
    write_verdict(folder, {.node = "gpu-7", .time = unix_time(), .level = HealthLevel::kBad, .reason = "XID 79"});
    MonitorTest::SetUp();
  }
};
class MonitorInPodOfItsNode : public MonitorInPod {
 protected:
  void SetUp() override {
    setenv(kHealthNodeVariable, "gpu-7", 1);
    MonitorInPod::SetUp();
    unsetenv(kHealthNodeVariable);
  }
};

TEST_F(MonitorInPodOfItsNode, TakesTheVerdictOfItsNode) {
  const nlohmann::json health = hear("hello").at("health");
  EXPECT_TRUE(health.at("is_bad").get<bool>());
  EXPECT_EQ(health.at("reason"), "XID 79");
}

TEST_F(MonitorInPod, TakesNoVerdictOfAnotherNode) { EXPECT_TRUE(hear("hello").at("health").is_null()); }

TEST_F(MonitorTest, EndsWithItsLauncher) {
  hear("hello");
  order({{"do", "watch"}, {"attempt", 1}});
  const pid_t rank = start_rank(1);
  hear("beat", [](const nlohmann::json& body) { return body.at("attempt") == 1; });
  close(std::exchange(input_[1], -1));
  EXPECT_EQ(status_of(rank), 128 + SIGKILL);
}

}  // namespace
}  // namespace tessera
