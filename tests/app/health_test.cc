// Tests `tessera health` as a program. A folder stands in for the machine.
#include "base/unix_time.h"
#include "device/cuda.h"
#include "health/verdict.h"
#include "tests/app/process.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using app_test::Finished;
using app_test::Process;
using data::write_file;
using ::testing::HasSubstr;
using ::testing::Not;

const std::string kReason = "[node_problem] gpuXid: GPU 3: XID 79";

class HealthCommands : public ::testing::Test {
 protected:
  HealthCommands() {
    fs::create_directories(folder_);
    write_file(root_ / "dev/kmsg", "");
  }

  /// Returns the words that start `tessera health COMMAND` on the folder that stands in for the machine.
  std::vector<std::string> words(const std::string& command, const std::vector<std::string>& more = {}) const {
    std::vector<std::string> words = {"health",    command,        "--folder", folder_.string(),
                                      "--sysroot", root_.string(), "--nvml",   "/nowhere"};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }
  Finished check(const std::vector<std::string>& more = {}) const {
    return Process(scratch_, words("check", more)).finish();
  }

  void judge(HealthLevel level, double time = unix_time()) const {
    write_verdict(folder_,
                  {.node = "n1", .time = time, .level = level, .reason = level == HealthLevel::kBad ? kReason : ""});
  }

  /// Runs the daemon until it has judged the node. Returns its verdict.
  NodeVerdict serve_once(const std::vector<std::string>& more = {}) const {
    const double begin = unix_time();
    const Process daemon(scratch_, words("serve", more));
    std::optional<NodeVerdict> verdict;
    for (int i = 0; i < 3000 && (!verdict || verdict->time < begin); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      verdict = read_verdict(folder_);
    }
    daemon.send(SIGTERM);
    EXPECT_EQ(daemon.finish().status, 0) << daemon.output();
    return verdict.value_or(NodeVerdict());
  }

  const data::TemporaryFolder scratch_;
  const fs::path root_ = scratch_ / "root", folder_ = scratch_ / "health";
};

TEST_F(HealthCommands, OneLookAlsoJudgesTheDaemonsVerdict) {
  EXPECT_THAT(check().output, HasSubstr("unknown: there is no verdict of the last 60 s in '"));
  judge(HealthLevel::kOk);
  EXPECT_EQ(check().status, 0);
  judge(HealthLevel::kBad);
  const Finished bad = check();
  EXPECT_EQ(bad.status, 1);
  EXPECT_THAT(bad.output, HasSubstr("bad      verdict: " + kReason));
  judge(HealthLevel::kBad, unix_time() - 100.0);
  EXPECT_EQ(check().status, 0);
}

TEST_F(HealthCommands, TheCheckBeforeAJobReturnsNoBadNode) {
  judge(HealthLevel::kBad);
  const Finished before_job = check({"--active", "--before-job"});
  EXPECT_EQ(before_job.status, 1) << before_job.output;
  EXPECT_THAT(before_job.output, HasSubstr(kReason));
  EXPECT_FALSE(read_active_check(folder_));
  const Finished repaired = check({"--active"});
  EXPECT_EQ(repaired.status, 0) << repaired.output;
  EXPECT_THAT(repaired.output, HasSubstr(kReason));
  EXPECT_TRUE(read_active_check(folder_));
}

TEST_F(HealthCommands, TheDaemonLearnsOfACheckBeforeAJobThatFails) {
  EXPECT_EQ(check({"--active", "--before-job", "--expect-tflops", "100000"}).status, 1);
  ASSERT_TRUE(read_active_check(folder_));
  EXPECT_EQ(read_active_check(folder_)->findings.front().signal, "gemmSlow");
}

TEST_F(HealthCommands, GpusThatCudaCannotUseFailTheActiveCheck) {
  const Finished without_gpus = check({"--active", "--gpus", "1000"});
  if (!cuda::is_built()) {  // which says nothing about the node
    EXPECT_EQ(without_gpus.status, 2) << without_gpus.output;
    EXPECT_THAT(without_gpus.output, HasSubstr("no CUDA"));
    EXPECT_FALSE(read_active_check(folder_));
    return;
  }
  EXPECT_EQ(without_gpus.status, 1) << without_gpus.output;
  EXPECT_THAT(without_gpus.output, HasSubstr(" of 1000 GPUs"));
  ASSERT_TRUE(read_active_check(folder_));
  EXPECT_EQ(read_active_check(folder_)->findings.front().signal, "gpuMissing");
  EXPECT_THAT(check({"--active", "--check-on-cpu", "--gpus", "1000"}).output, Not(HasSubstr("CUDA can use")));
  EXPECT_TRUE(read_active_check(folder_)->findings.empty());
}

// Slurm shows the Prolog the GPUs of the job only.
TEST_F(HealthCommands, ACheckOfSomeGpusFindsNoneMissingAndReturnsNoNode) {
  ::setenv("CUDA_VISIBLE_DEVICES", "-1", 1);
  const std::string hidden = check({"--active", "--gpus", "8"}).output;
  ::setenv("CUDA_VISIBLE_DEVICES", "900,901", 1);
  const std::string some = check({"--active", "--gpus", "8", "--before-job"}).output;
  ::unsetenv("CUDA_VISIBLE_DEVICES");
  EXPECT_THAT(hidden, HasSubstr("this check returns no node"));
  EXPECT_THAT(hidden, Not(HasSubstr("CUDA can use")));
  EXPECT_THAT(some, HasSubstr(cuda::is_built() ? "CUDA can use 0 of 2 GPUs" : "no CUDA"));
}

TEST_F(HealthCommands, ACheckReturnsNoNodeWhoseGpusNobodyCanCount) {
  fs::create_directories(root_ / "proc/driver/nvidia");
  EXPECT_THAT(check({"--active"}).output, HasSubstr("this check returns no node"));
  EXPECT_FALSE(read_active_check(folder_));
}

TEST_F(HealthCommands, AProbeThatCannotLookAnyMoreKeepsABadNodeBad) {
  write_file(root_ / "proc/sys/kernel/random/boot_id", "8f1c\n");
  write_verdict(folder_, {.node = "n1",
                          .time = 1000.0,
                          .level = HealthLevel::kBad,
                          .reason = kReason,
                          .bad_since = 900.0,
                          .boot_id = "8f1c"});
  const fs::path driver = root_ / "proc/driver/nvidia";
  const Process daemon(scratch_, words("serve", {"--period", "0.05", "--node", "n1"}));
  daemon.wait_for_output("verdicts in");
  for (int i = 0; i < 3000 && read_verdict(folder_)->time == 1000.0; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  fs::create_directories(driver);
  daemon.wait_for_output("cannot look: gpu");
  write_active_check(folder_, unix_time(), {});
  daemon.wait_for_output("an active check has passed");
  std::this_thread::sleep_for(std::chrono::milliseconds(500));  // about ten rounds of probes
  EXPECT_EQ(read_verdict(folder_)->level, HealthLevel::kBad);
  fs::remove(driver);
  daemon.wait_for_output("n1 is ok");
  daemon.send(SIGTERM);
  daemon.finish();
}

TEST_F(HealthCommands, ADaemonThatStartsAnewContinuesFromTheLastVerdict) {
  write_file(root_ / "proc/sys/kernel/random/boot_id", "8f1c\n");
  NodeVerdict before = {.node = "n1",
                        .time = 1000.0,
                        .level = HealthLevel::kBad,
                        .reason = kReason,
                        .bad_since = 900.0,
                        .boot_id = "8f1c"};
  write_verdict(folder_, before);
  EXPECT_EQ(serve_once().level, HealthLevel::kBad);
  EXPECT_EQ(read_verdict(folder_)->reason, kReason);
  EXPECT_EQ(read_verdict(folder_)->bad_since, 900.0);
  EXPECT_FALSE(fs::exists(folder_ / "ledger.jsonl"));  // the last daemon has recorded this already
  before.boot_id = "another boot";
  write_verdict(folder_, before);
  EXPECT_EQ(serve_once().level, HealthLevel::kOk);
}

TEST_F(HealthCommands, AnEntryThatTheLedgerCouldNotTakeIsAddedLater) {
  const fs::path in_the_way = write_file(scratch_ / "var", ""), ledger = in_the_way / "ledger.jsonl";
  const Process daemon(scratch_, words("serve", {"--gpus", "8", "--period", "0.05", "--ledger", ledger.string()}));
  daemon.wait_for_output("is bad");
  daemon.wait_for_output("var' is a file");
  fs::remove(in_the_way);
  for (int i = 0; i < 3000 && !fs::exists(ledger); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  daemon.send(SIGTERM);
  daemon.finish();
  const std::string entries = read_text_file(ledger);
  EXPECT_THAT(entries, HasSubstr("gpuMissing"));
  EXPECT_EQ(std::ranges::count(entries, '\n'), 1);
}

TEST_F(HealthCommands, EachProbeThatCannotLookIsToldOnce) {
  const fs::path driver = root_ / "proc/driver/nvidia";
  fs::create_directories(driver);
  fs::remove(root_ / "dev/kmsg");
  const Process daemon(scratch_, words("serve", {"--period", "0.05"}));
  daemon.wait_for_output("cannot look: kernel log");
  daemon.wait_for_output("cannot look: gpu");
  fs::remove(driver);
  daemon.wait_for_output("can look again: gpu");
  daemon.send(SIGTERM);
  const std::string output = daemon.finish().output;
  EXPECT_EQ(output.find("cannot look: kernel log"), output.rfind("cannot look: kernel log"));
}

TEST_F(HealthCommands, NumbersOutOfRangeAreRefused) {
  using Words = std::vector<std::string>;
  for (const Words& arguments : {Words{"links", "--slow", "5"}, Words{"links", "--expect-inside", "-3"},
                                 Words{"links", "--expect-between", "nan"}, Words{"check", "--expect-tflops", "-1"},
                                 Words{"check", "--expect-copy", "x"}}) {
    Words command = {"health"};
    command.insert(command.end(), arguments.begin(), arguments.end());
    const Finished finished = Process(scratch_, command).finish();
    EXPECT_NE(finished.status, 0) << finished.output;
    EXPECT_THAT(finished.output, HasSubstr(arguments.back() + " is not a number from 0 to "));
  }
}

// The folder is another machine's. Its full disk must drain no node.
TEST_F(HealthCommands, AFolderForRatesThatCannotBeWrittenMakesNoNodeBad) {
  const fs::path in_the_way = write_file(scratch_ / "rates", "");
  const Finished finished = check({"--active", "--check-on-cpu", "--rates", in_the_way.string()});
  EXPECT_EQ(finished.status, 0) << finished.output;
  EXPECT_THAT(finished.output, HasSubstr("the node's rates are not recorded: "));
  ASSERT_TRUE(read_active_check(folder_));
  EXPECT_TRUE(read_active_check(folder_)->findings.empty());
}

// The verdicts lie in memory. The ledger must be there after a boot.
TEST_F(HealthCommands, TheLedgersDefaultPlaceOutlivesABoot) {
  const std::string help = Process(scratch_, {"health", "serve", "--help"}).finish().output;
  EXPECT_THAT(help, HasSubstr("/var/lib/tessera-health"));
}

TEST_F(HealthCommands, FindingsArePrintedIfTheFolderCannotBeWritten) {
  fs::create_directories(folder_ / "active_check.json");  // no file can take this name, even if root writes it
  const Finished finished = check({"--active", "--expect-tflops", "100000"});
  EXPECT_EQ(finished.status, 1) << finished.output;
  EXPECT_THAT(finished.output, HasSubstr("gemmSlow"));
  EXPECT_THAT(finished.output, HasSubstr("the daemon does not learn of this check"));
}

}  // namespace
}  // namespace tessera
