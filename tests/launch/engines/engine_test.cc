#include "launch/engines/engine.h"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <iterator>

#include "base/file.h"
#include "system/shell_word.h"
#include "tests/data/support.h"
#include "tests/expect_error.h"

namespace tessera {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::IsSupersetOf;

TEST(Engine, OneRankOfThisMachineNeedsNoStarter) {
  const auto engine = make_local_engine({});
  EXPECT_THAT(engine->on_ranks(engine->nodes(), 1, {}, {"tessera", "train"}), ElementsAre("tessera", "train"));
  const CommandLine two = engine->on_ranks(engine->nodes(), 2, {"A"}, {"tessera", "train"});
  EXPECT_EQ(two.front(), "mpirun");
  EXPECT_THAT(two, Contains("--oversubscribe"));
  EXPECT_EQ(two.back(), "train");
}

TEST(Engine, HostsKeepTheirOrderAndGetTheirRanks) {
  const auto engine = make_hosts_engine({"n1", "n2", "n3"}, {"--mca", "x"});
  const CommandLine command = engine->on_ranks({"n3", "n1"}, 4, {"TESSERA_ATTEMPT"}, {"tessera"});
  EXPECT_THAT(command, Contains("n3:4,n1:4"));
  EXPECT_THAT(command, Contains("8"));
  EXPECT_THAT(command, Contains("TESSERA_ATTEMPT"));
  EXPECT_THAT(command, Contains("x"));
  const auto mapping = std::ranges::find(command, "--map-by");  // by slot, or the launcher blames the wrong node
  ASSERT_NE(mapping, command.end());
  EXPECT_EQ(*std::next(mapping), "slot");
}

TEST(Engine, RanksOfOtherHostsGetTheSettingsOfNccl) {
  setenv("NCCL_IB_TIMEOUT", "22", 1);
  const CommandLine command = make_hosts_engine({"n1"}, {})->on_ranks({"n1"}, 2, {"TESSERA_ATTEMPT"}, {"tessera"});
  unsetenv("NCCL_IB_TIMEOUT");
  const auto at = std::ranges::find(command, "NCCL_IB_TIMEOUT");
  ASSERT_NE(at, command.end());
  EXPECT_EQ(*std::prev(at), "-x");
}

TEST(Engine, AProgramOnAHostIsOneWordForItsShell) {
  const CommandLine command = make_hosts_engine({"n1"}, {})->on_node("n1", {"tessera", "--folder", "a b"});
  EXPECT_EQ(command.front(), "ssh");
  EXPECT_THAT(command, Contains("-oBatchMode=yes"));  // else ssh may wait for a password
  EXPECT_EQ(command.back(), "exec tessera --folder 'a b'");
}

TEST(Engine, OnlyASchedulerIsToldOfDrainedNodes) {
  EXPECT_FALSE(make_hosts_engine({"n1"}, {})->drain("n1", "why"));
  EXPECT_FALSE(make_hosts_engine({"n1"}, {})->undrain("n1", ""));
}

/// An allocation of Slurm with the node n1. scontrol and srun are scripts. scontrol writes down what it is asked to
/// update.
class SlurmAllocation : public ::testing::Test {
 protected:
  SlurmAllocation() {
    make_program("srun", "echo none pmix\n");
    make_program("scontrol", fmt::format("case \"$*\" in\n"
                                         "  'show hostnames n1') echo n1 ;;\n"
                                         "  '-o show node n1') echo 'NodeName=n1 Reason=slow disk [root@2026]' ;;\n"
                                         "  *) echo \"$*\" >> {} ;;\nesac\n",
                                         (scratch_ / "log").string()));
    setenv("PATH", fmt::format("{}:{}", scratch_.path().string(), path_).c_str(), 1);
    setenv("SLURM_JOB_NODELIST", "n1", 1);
    setenv("SLURM_JOB_ID", "7", 1);
  }
  void TearDown() override {
    for (const char* name : {"SLURM_JOB_NODELIST", "SLURM_JOB_ID"}) unsetenv(name);
    setenv("PATH", path_.c_str(), 1);
  }
  void make_program(const std::string& name, const std::string& script) const {
    const auto path = data::write_file(scratch_ / name, "#!/bin/sh\n" + script);
    std::filesystem::permissions(path, std::filesystem::perms::owner_all);
  }

  const data::TemporaryFolder scratch_;
  const std::string path_ = std::getenv("PATH");
};

/// After a spare has replaced a node, their order is not Slurm's. Without its option, srun starts ranks in Slurm's
/// order, and the launcher blames the wrong node.
TEST_F(SlurmAllocation, RanksRunOnTheNodesInTheGivenOrder) {
  const CommandLine command = make_slurm_engine({})->on_ranks({"n1", "n4", "n3"}, 2, {}, {"tessera"});
  EXPECT_THAT(command, IsSupersetOf({"-N3", "-n6", "--distribution=arbitrary", "--export=ALL", "--overlap", "--no-kill",
                                     "--kill-on-bad-exit=0"}));
  const auto option = std::ranges::find(command, "-w");
  ASSERT_NE(option, command.end());
  EXPECT_EQ(*std::next(option), "n1,n1,n4,n4,n3,n3");
}

TEST_F(SlurmAllocation, ANodeIsUsedAgainThatIsStillDrainedForTheReason) {
  const auto engine = make_slurm_engine({});
  const auto run = [&](const std::string& reason) {
    data::write_file(scratch_ / "log", "");
    std::system(shell_line(*engine->undrain("n1", reason)).c_str());  // NOLINT(bugprone-command-processor)
    return read_text_file(scratch_ / "log");
  };
  const std::string resume = "update nodename=n1 state=resume\n";
  EXPECT_EQ(run("slow disk"), resume);
  EXPECT_EQ(run("slow"), "");  // somebody has drained it for something else
  EXPECT_EQ(run(""), resume);  // an operator asks for it
}

TEST(Engine, HostsComeFromAListOrAFile) {
  const data::TemporaryFolder scratch;
  EXPECT_THAT(read_hosts("n1,n2"), ElementsAre("n1", "n2"));
  const auto file = data::write_file(scratch / "hosts", "# a comment\nn1 slots=8\n\n  n2\n");
  EXPECT_THAT(read_hosts(file.string()), ElementsAre("n1", "n2"));
  expect_error([] { read_hosts("n1,n1"); }, {"'n1' twice"});
  expect_error([] { read_hosts("/no/such/file"); }, {"no file '/no/such/file'"});
  expect_error([&] { read_hosts(data::write_file(scratch / "none", "# nothing\n").string()); }, {"names no host"});
}

TEST(Engine, SlurmNeedsAnAllocation) {
  unsetenv("SLURM_JOB_NODELIST");
  expect_error([] { make_slurm_engine({}); }, {"sbatch or salloc"});
}

}  // namespace
}  // namespace tessera
