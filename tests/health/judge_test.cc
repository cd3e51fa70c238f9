#include "health/judge.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "base/error.h"
#include "base/file.h"
#include "tests/data/support.h"
#include "tests/expect_error.h"

namespace tessera {
namespace {

using data::TemporaryFolder;
using ::testing::ElementsAre;

const Finding kXid = {
    .signal = "gpuXid", .part = "GPU 3", .evidence = EvidenceKind::kHard, .value = 79, .detail = "XID 79"};
const Finding kErrors = {
    .signal = "gpuLinkErrors", .part = "GPU 3 link 1", .evidence = EvidenceKind::kSoft, .detail = "rises"};
const Finding kRate = {
    .signal = "networkRate", .part = "mlx5_0 port 1", .evidence = EvidenceKind::kSoft, .detail = "200"};
const Finding kHot = {.signal = "gpuTemperature", .part = "GPU 3", .evidence = EvidenceKind::kAlert, .detail = "90 C"};

HealthLevel level(Judge& judge, const std::vector<Finding>& findings, double now = 1000.0) {
  return judge.judge(findings, now).level;
}

TEST(Judge, HardEvidenceCountsInTheSecondPollInARow) {
  Judge judge("n1", {});
  EXPECT_EQ(level(judge, {kXid}), HealthLevel::kSuspect);
  EXPECT_EQ(level(judge, {}), HealthLevel::kOk);  // the finding was a glitch
  EXPECT_EQ(level(judge, {kXid}, 1010.0), HealthLevel::kSuspect);
  const NodeVerdict verdict = judge.judge({kXid}, 1015.0);
  EXPECT_EQ(verdict.level, HealthLevel::kBad);
  EXPECT_EQ(verdict.reason, "[node_problem] gpuXid: GPU 3: XID 79");
  EXPECT_EQ(verdict.bad_since, 1015.0);
  ASSERT_EQ(verdict.items.size(), 1u);
  EXPECT_EQ(verdict.items.front().since, 1010.0);
}

TEST(Judge, SoftEvidenceNeedsASecondSignal) {
  Judge judge("n1", {});
  Finding other_link = kErrors;
  other_link.part = "GPU 4 link 1";
  for (int i = 0; i < 10; ++i) EXPECT_EQ(level(judge, {kErrors, other_link, kHot}), HealthLevel::kSuspect);
  EXPECT_EQ(level(judge, {kErrors, kRate}), HealthLevel::kSuspect);  // the second signal is new
  const NodeVerdict verdict = judge.judge({kErrors, kRate}, 1000.0);
  EXPECT_EQ(verdict.level, HealthLevel::kBad);
  EXPECT_EQ(verdict.reason, "[node_problem] gpuLinkErrors: GPU 3 link 1: rises; also networkRate");
}

TEST(Judge, TwoReportsOfOneEventAreOneSignal) {
  const auto soft = [](const char* signal) {
    return Finding{.signal = signal, .evidence = EvidenceKind::kSoft, .detail = "seen"};
  };
  Judge judge("n1", {});
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(level(judge, {soft("gpuXid"), soft("kernelXid"), soft("gpuRowRemapPending")}), HealthLevel::kSuspect);
  }
  Judge of_disk("n1", {});
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(level(of_disk, {soft("diskErrors"), soft("kernelDiskError")}), HealthLevel::kSuspect);
  }
  // Corrected errors, and one that was not, are two events.
  Judge of_memory("n1", {});
  level(of_memory, {soft("memoryCorrected"), soft("kernelHardwareError")});
  EXPECT_EQ(level(of_memory, {soft("memoryCorrected"), soft("kernelHardwareError")}), HealthLevel::kBad);
  level(judge, {soft("kernelXid"), soft("kernelHardwareError")});
  EXPECT_EQ(judge.judge({soft("kernelXid"), soft("kernelHardwareError")}, 1000.0).reason,
            "[node_problem] kernelXid: seen; also kernelHardwareError");
}

TEST(Judge, HeatAloneOnlyAlerts) {
  Judge judge("n1", {});
  for (int i = 0; i < 10; ++i) EXPECT_EQ(level(judge, {kHot}), HealthLevel::kOk);
  EXPECT_EQ(judge.judge({kHot}, 1000.0).items.size(), 1u);
}

TEST(Judge, ANodeThatWasBadOftenIsBadWithOneSoftSignal) {
  constexpr double kNow = 100 * 86400.0;
  const std::vector<double> past = {kNow - 86400.0, kNow - 2 * 86400.0, kNow - 3 * 86400.0};
  Judge lemon("n1", past);
  EXPECT_EQ(level(lemon, {kErrors}, kNow), HealthLevel::kSuspect);
  EXPECT_EQ(level(lemon, {kErrors}, kNow), HealthLevel::kBad);
  Judge lemon_with_a_past("n1", {kNow - 50 * 86400.0, past[0], past[1], past[2]});
  level(lemon_with_a_past, {kErrors}, kNow);
  EXPECT_THAT(lemon_with_a_past.judge({kErrors}, kNow).reason, testing::HasSubstr("bad 3 times in"));
  Judge long_ago("n1", past);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(level(long_ago, {kErrors}, kNow + 40 * 86400.0), HealthLevel::kSuspect);
}

TEST(Judge, ABadNodeIsBadUntilAnActiveCheckHasPassed) {
  Judge judge("n1", {});
  level(judge, {kXid});
  level(judge, {kXid});
  for (int i = 0; i < 100; ++i) EXPECT_EQ(level(judge, {}), HealthLevel::kBad);
  judge.pass_active_check(2000.0);
  EXPECT_EQ(judge.judge({}, 2001.0).active_check, 0.0);
  const NodeVerdict verdict = judge.judge({}, 2006.0);
  EXPECT_EQ(verdict.level, HealthLevel::kOk);
  EXPECT_EQ(verdict.active_check, 2000.0);
  EXPECT_EQ(verdict.reason, "");
  // A new fault makes the node bad again.
  EXPECT_EQ(level(judge, {kXid}), HealthLevel::kSuspect);
  EXPECT_EQ(level(judge, {kXid}), HealthLevel::kBad);
}

// The active check multiplies and copies. It passes on a node whose link is down.
TEST(Judge, AnActiveCheckThatPassesDoesNotHideAFaultThatIsStillThere) {
  Judge judge("n1", {});
  level(judge, {kXid}, 1000.0);
  const double bad_since = judge.judge({kXid}, 1005.0).bad_since;
  judge.pass_active_check(2000.0);
  for (double now = 2000.0; now < 2050.0; now += 5.0) {
    const NodeVerdict verdict = judge.judge({kXid}, now);
    EXPECT_EQ(verdict.level, HealthLevel::kBad);
    EXPECT_EQ(verdict.bad_since, bad_since);
    EXPECT_EQ(verdict.active_check, 0.0);
    EXPECT_FALSE(verdict.reason.empty());
  }
  EXPECT_EQ(judge.times_bad(), 1u);
  for (int i = 0; i < 10; ++i) EXPECT_EQ(level(judge, {}), HealthLevel::kBad);  // that check is void
  judge.pass_active_check(3000.0);
  level(judge, {kXid});  // a glitch only delays the check
  EXPECT_EQ(level(judge, {}), HealthLevel::kBad);
  EXPECT_EQ(level(judge, {}), HealthLevel::kOk);
}

// The operator is told of the fault that is there, and not of one that a reset has mended.
TEST(Judge, AfterACheckThatDoesNotCountTheReasonIsTheFaultThatIsLeft) {
  Judge judge("n1", {});
  level(judge, {kXid});
  EXPECT_THAT(judge.judge({kXid}, 1005.0).reason, testing::HasSubstr("gpuXid"));
  judge.pass_active_check(2000.0);
  const Finding link = {.signal = "networkLink", .part = "mlx5_0", .evidence = EvidenceKind::kHard, .detail = "down"};
  level(judge, {link}, 2001.0);
  const NodeVerdict verdict = judge.judge({link}, 2006.0);
  EXPECT_THAT(verdict.reason, testing::HasSubstr("networkLink"));
  EXPECT_EQ(verdict.bad_since, 1005.0);
}

// NVML often hangs when a GPU has fallen off the bus.
TEST(Judge, AProbeThatCannotLookConfirmsNoCheck) {
  Judge judge("n1", {});
  level(judge, {kXid});
  level(judge, {kXid});
  judge.pass_active_check(2000.0);
  for (int i = 0; i < 10; ++i) EXPECT_EQ(judge.judge({}, 2000.0, false).level, HealthLevel::kBad);
  EXPECT_EQ(level(judge, {}), HealthLevel::kBad);
  EXPECT_EQ(judge.judge({}, 2000.0, false).level, HealthLevel::kBad);  // the polls must follow each other
  EXPECT_EQ(level(judge, {}), HealthLevel::kBad);
  EXPECT_EQ(level(judge, {}), HealthLevel::kOk);
}

TEST(Judge, ABadNodeIsStillBadForTheNextDaemon) {
  Judge first("n1", {});
  level(first, {kXid});
  NodeVerdict before = first.judge({kXid}, 1005.0);
  before.active_check = 500.0;  // an earlier check had passed
  Judge second("n1", {before.bad_since});
  second.resume(before);
  const NodeVerdict after = second.judge({}, 1100.0);
  EXPECT_EQ(after.level, HealthLevel::kBad);
  EXPECT_EQ(after.reason, before.reason);
  EXPECT_EQ(after.bad_since, 1005.0);
  EXPECT_EQ(after.active_check, 500.0);
  EXPECT_EQ(second.times_bad(), 1u);
}

TEST(Judge, AReasonIsOneLine) {
  Judge judge("n1", {});
  Finding odd = kXid;
  odd.detail = "a \"line\"\nand 'more'" + std::string(1000, 'x');
  level(judge, {odd});
  const std::string reason = judge.judge({odd}, 1000.0).reason;
  EXPECT_EQ(reason.find_first_of("\n\"'"), reason.npos);
  EXPECT_EQ(reason.size(), 400u);
}

TEST(VerdictFile, IsReadAsItWasWritten) {
  const TemporaryFolder scratch;
  EXPECT_FALSE(read_verdict(scratch.path()));
  Judge judge("n1", {});
  level(judge, {kXid});
  NodeVerdict verdict = judge.judge({kXid, kHot}, 1015.5);
  verdict.boot_id = "8f1c";
  write_verdict(scratch.path(), verdict);
  const std::optional<NodeVerdict> read = read_verdict(scratch.path());
  ASSERT_TRUE(read);
  EXPECT_EQ(to_json(*read), to_json(verdict));
  EXPECT_TRUE(read->is_fresh(1070.0));
  EXPECT_FALSE(read->is_fresh(1080.0));
  write_active_check(scratch.path(), 7.0, {kXid});
  const std::optional<ActiveCheckResult> check = read_active_check(scratch.path());
  ASSERT_TRUE(check);
  EXPECT_EQ(check->time, 7.0);
  EXPECT_EQ(check->findings.front().detail, "XID 79");
}

TEST(VerdictFile, DamageIsAnError) {
  const TemporaryFolder scratch;
  for (const char* text :
       {"", "{}", R"({"format": "other", "version": 1})", R"({"format": "tessera-health-verdict", "version": 2})",
        R"({"format": "tessera-health-verdict", "version": 1, "node": "n", "time": 1, "level": "x"})"}) {
    write_whole_file(scratch / kVerdictName, text);
    expect_error([&] { read_verdict(scratch.path()); }, {"verdict.json"});
  }
}

TEST(HealthLedger, KeepsTheNewestEntries) {
  const TemporaryFolder scratch;
  HealthLedger ledger(scratch / "new" / "ledger.jsonl");
  EXPECT_THAT(ledger.read(), ElementsAre());
  for (const double time : {1.0, 2.0}) ledger.add({.node = "n1", .bad_since = time});
  std::ofstream(scratch / "new" / "ledger.jsonl", std::ios::app) << "{\"bad_si\n";  // a crash has cut this line short
  ledger.add({.node = "n1", .bad_since = 3.0});
  EXPECT_THAT(ledger.read(), ElementsAre(1.0, 2.0, 3.0));
  for (int i = 4; i < 1100; ++i) ledger.add({.node = "n1", .bad_since = static_cast<double>(i)});
  EXPECT_EQ(ledger.read().size(), 1000u);
  EXPECT_EQ(ledger.read().back(), 1099.0);
}

}  // namespace
}  // namespace tessera
