#include "launch/engines/slurm.h"

#include <gmock/gmock.h>

#include "tests/expect_error.h"

namespace tessera {
namespace {

// Excerpts of what Slurm 22.05 prints.
constexpr const char* kRunning =
    "JobId=1 JobName=run.sh UserId=root(0) Priority=4294901759 JobState=RUNNING Reason=None Requeue=1 Restarts=2 "
    "BatchFlag=1 Reboot=0 ExitCode=0:0 NodeList=n[1-4] BatchHost=n1 NumNodes=4\n";
constexpr const char* kPending = "JobId=1 JobState=PENDING Reason=BeginTime Requeue=1 Restarts=1 NodeList=(null)\n";

TEST(Slurm, AJobIsReadFromItsLine) {
  const SlurmJob running = parse_slurm_job(kRunning);
  EXPECT_EQ(running.state, "RUNNING");
  EXPECT_EQ(running.restarts, 2);
  EXPECT_EQ(running.host, "n1");
  EXPECT_FALSE(running.has_ended());
  const SlurmJob pending = parse_slurm_job(kPending);
  EXPECT_EQ(pending.state, "PENDING");
  EXPECT_EQ(pending.host, "");
  EXPECT_FALSE(pending.has_ended());
  for (const char* state : {"FAILED", "CANCELLED", "COMPLETED", kForgottenJob}) {
    EXPECT_TRUE(SlurmJob{.state = state}.has_ended()) << state;
  }
  for (const char* line : {"", "slurm_load_jobs error", "JobState=RUNNING", "JobState=RUNNING Restarts=two"}) {
    expect_error([&] { parse_slurm_job(line); }, {"JobState and Restarts"});
  }
}

TEST(Slurm, ANodeThatDoesNotRespondIsDown) {
  for (const char* state : {"DOWN", "DOWN+NOT_RESPONDING", "MIXED+NOT_RESPONDING", "ALLOCATED*", "IDLE+DOWN+DRAIN"}) {
    EXPECT_TRUE(is_down("NodeName=n1 CPUAlloc=1 State=" + std::string(state) + " ThreadsPerCore=1")) << state;
  }
  for (const char* state : {"MIXED", "ALLOCATED", "IDLE+DRAIN"}) {
    EXPECT_FALSE(is_down("NodeName=n1 CPUAlloc=1 State=" + std::string(state) + " NextState=DOWN")) << state;
  }
}

TEST(Slurm, ANodesReasonIsReadWhole) {
  const SchedulerNode drained = parse_slurm_node(
      "NodeName=n1 State=IDLE+DRAIN ThreadsPerCore=1 Comment=(null) "
      "Reason=[node_problem] gpuXid: GPU 3: XID 79 [root@2026-11-24T05:00:00]\n");
  EXPECT_TRUE(drained.is_drained);
  EXPECT_EQ(drained.reason, "[node_problem] gpuXid: GPU 3: XID 79");
  const SchedulerNode idle = parse_slurm_node("NodeName=n1 State=IDLE ThreadsPerCore=1\n");
  EXPECT_FALSE(idle.is_drained);
  EXPECT_EQ(idle.reason, "");
}

TEST(Slurm, ACommandThatFailsIsAnErrorWithItsOutput) {
  EXPECT_EQ(output_of("echo one"), "one\n");
  expect_error([] { output_of("sh -c 'echo why; exit 3'"); }, {"'sh -c 'echo why; exit 3'' failed: why"});
}

}  // namespace
}  // namespace tessera
