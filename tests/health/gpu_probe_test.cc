// Tests the GPU probe with a library in NVML's place (nvml_stub.cc).
#include "health/gpu_probe.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <set>

#include "health/judge.h"
#include "tests/data/support.h"
#include "tests/expect_error.h"
#include "tests/health/findings.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

using data::TemporaryFolder;

class GpuProbe : public ::testing::Test {
 protected:
  GpuProbe() {
    ::setenv("TESSERA_NVML_STUB", (scratch_ / "gpus").c_str(), 1);
    set("count 2\n");
  }

  void set(const std::string& text) const { std::ofstream(scratch_ / "gpus") << text; }
  /// Returns what the next poll finds.
  std::vector<std::string> look() {
    result_ = probe_->look(now_ += 5.0);
    return names_of(result_.findings);
  }
  EvidenceKind evidence() const { return result_.findings.at(0).evidence; }

  TemporaryFolder scratch_;
  std::unique_ptr<Probe> probe_ = make_gpu_probe({.library = NVML_STUB});
  double now_ = 0.0;
  ProbeResult result_;
};

TEST_F(GpuProbe, WhatIsNotSupportedIsNoFault) {
  EXPECT_THAT(look(), IsEmpty());  // no key is supported; a lone H100 has no NVLink either
  set("count 2\n0 temperature 40\n0 link.0 0\n0 field.230 0\n");
  EXPECT_THAT(look(), IsEmpty());  // the link was never up
}

TEST_F(GpuProbe, FaultsAreFound) {
  const std::string healthy = "count 2\n0 link.0 1\n1 ecc 4\n1 field.161.0 0\n1 link.0 1\n0 fabric.state 3\n";
  struct Case {
    const char* line;
    const char* found;
    EvidenceKind evidence;
  };
  for (const Case& one :
       {Case{"0 temperature 95", "gpuTemperature GPU 0", EvidenceKind::kAlert},
        Case{"0 throttle 64", "gpuThrottled GPU 0", EvidenceKind::kAlert},
        Case{"1 ecc 5", "gpuEcc GPU 1", EvidenceKind::kHard},
        Case{"1 remap.failure 1", "gpuRowRemap GPU 1", EvidenceKind::kHard},
        Case{"1 remap.pending 1", "gpuRowRemapPending GPU 1", EvidenceKind::kSoft},
        Case{"0 field.230 2", "gpuRecoveryAction GPU 0", EvidenceKind::kHard},
        Case{"0 link.0 0", "gpuLink GPU 0 link 0", EvidenceKind::kHard},
        Case{"1 field.161.0 100", "gpuLinkErrors GPU 1 link 0", EvidenceKind::kSoft},
        Case{"0 sram 1", "gpuSram GPU 0", EvidenceKind::kHard},
        Case{"0 fabric.state 2", "gpuFabric GPU 0", EvidenceKind::kHard},
        Case{"0 fabric.status 999", "gpuFabric GPU 0", EvidenceKind::kHard},
        Case{"0 fabric.health 2", "gpuFabric GPU 0", EvidenceKind::kHard},
        Case{"0 fabric.health 3", "gpuFabricLimited GPU 0", EvidenceKind::kSoft},
        Case{"0 lost 15", "gpuLost GPU 0", EvidenceKind::kHard}, Case{"count 1", "gpuMissing", EvidenceKind::kHard}}) {
    probe_ = make_gpu_probe({.library = NVML_STUB});
    set(healthy);
    EXPECT_THAT(look(), IsEmpty()) << one.line;
    set(healthy + one.line + "\n");
    EXPECT_THAT(look(), ElementsAre(one.found));
    EXPECT_EQ(evidence(), one.evidence) << one.line;
  }
}

// Hopper has the first three counters, and Blackwell has the others.
TEST_F(GpuProbe, EveryErrorCounterOfALinkIsWatched) {
  for (const int field : {161, 162, 163, 208, 211, 213, 214}) {
    probe_ = make_gpu_probe({.library = NVML_STUB});
    const std::string counter = fmt::format("count 2\n1 link.0 1\n1 field.{}.0 ", field);
    set(counter + "7\n");
    EXPECT_THAT(look(), IsEmpty()) << field;
    set(counter + "17\n");
    EXPECT_THAT(look(), IsEmpty()) << field;
    set(counter + "18\n");
    EXPECT_THAT(look(), ElementsAre("gpuLinkErrors GPU 1 link 0")) << field;
  }
}

// The GPUs behind a lost one keep their numbers, so that their counters are not compared with those of another GPU.
TEST_F(GpuProbe, AGpuThatLosesItsHandleKeepsItsNumber) {
  const std::string healthy = "count 3\n0 ecc 1\n1 ecc 2\n2 ecc 9\n1 link.0 1\n2 link.0 0\n";
  set(healthy);
  EXPECT_THAT(look(), IsEmpty());
  set(healthy + "1 handle 15\n1 xid 79\n");
  EXPECT_THAT(look(), ElementsAre("gpuLost GPU 1", "gpuXid GPU 1"));
  EXPECT_EQ(evidence(), EvidenceKind::kHard);
  const auto count = std::ranges::find_if(result_.measurements, [](const Measurement& one) {
    return one.name == "gpu_xid_total" && one.labels.at("gpu") == "GPU 1";
  });
  ASSERT_NE(count, result_.measurements.end());
  EXPECT_EQ(count->value, 1.0);
  set(healthy + "1 handle 16\n");
  probe_ = make_gpu_probe({.library = NVML_STUB});
  EXPECT_THAT(look(), ElementsAre("gpuLost GPU 1"));
  EXPECT_EQ(result_.findings.front().detail, "it must be reset");
}

TEST_F(GpuProbe, AGpuThatThisProcessMayNotOpenIsNotCounted) {
  set("count 3\n1 handle 4\n2 temperature 95\n");
  EXPECT_THAT(look(), ElementsAre("gpuTemperature GPU 2"));
  EXPECT_EQ(result_.measurements.front().name, "gpus");
  EXPECT_EQ(result_.measurements.front().value, 2.0);
}

TEST_F(GpuProbe, WhatUsesAGpuOfAnIdleNodeIsLeftOver) {
  set("count 2\n0 memory 5000000000\n1 memory 400000000\n1 process 4711\n");
  EXPECT_THAT(look(), IsEmpty());
  probe_ = make_gpu_probe({.library = NVML_STUB, .is_idle = true});
  EXPECT_THAT(look(), ElementsAre("leftoverGpuMemory GPU 0", "leftoverProcess GPU 1"));
}

TEST_F(GpuProbe, AnXidAndErrorsStayUntilAnActiveCheckHasPassed) {
  set("count 2\n0 ecc 4\n0 link.0 1\n0 field.161.0 0\n");
  EXPECT_THAT(look(), IsEmpty());
  set("count 2\n0 ecc 5\n0 link.0 1\n0 field.161.0 100\n1 xid 79\n");
  for (int i = 0; i < 3; ++i) {
    ASSERT_THAT(look(), ElementsAre("gpuEcc GPU 0", "gpuLinkErrors GPU 0 link 0", "gpuXid GPU 1"));
  }
  EXPECT_EQ(result_.findings.back().evidence, EvidenceKind::kHard);
  probe_->forget();
  EXPECT_THAT(look(), IsEmpty());
  // Prometheus' counter keeps its value.
  const auto count = std::ranges::find_if(result_.measurements, [](const Measurement& one) {
    return one.name == "gpu_xid_total" && one.labels.at("gpu") == "GPU 1";
  });
  ASSERT_NE(count, result_.measurements.end());
  EXPECT_EQ(count->value, 1.0);
}

// docs/cluster.md has this table.
TEST(Xids, ProveWhatTheTableSays) {
  const std::set<std::uint64_t> hard = {46, 48, 62, 64, 74, 79, 95, 109, 110, 119, 120, 136, 140, 143};
  const std::set<std::uint64_t> of_programs = {13, 31, 43, 45, 68, 69};
  for (std::uint64_t xid = 0; xid < 256; ++xid) {
    const EvidenceKind other = of_programs.contains(xid) ? EvidenceKind::kAlert : EvidenceKind::kSoft;
    EXPECT_EQ(evidence_of_xid(xid), hard.contains(xid) ? EvidenceKind::kHard : other) << xid;
  }
}

TEST_F(GpuProbe, XidsOfProgramsOnlyAlert) {
  EXPECT_THAT(look(), IsEmpty());
  set("count 2\n0 xid 31\n");
  EXPECT_THAT(look(), ElementsAre("gpuXid GPU 0"));
  EXPECT_EQ(evidence(), EvidenceKind::kAlert);
  set("count 2\n0 xid 31\n0 xid 94\n");
  EXPECT_THAT(look(), ElementsAre("gpuXid GPU 0", "gpuXid GPU 0"));
}

TEST_F(GpuProbe, AnXidThatIsNotHardIsReportedForTenMinutes) {
  EXPECT_THAT(look(), IsEmpty());
  set("count 2\n0 xid 94\n1 xid 79\n");
  EXPECT_THAT(look(), ElementsAre("gpuXid GPU 0", "gpuXid GPU 1"));
  now_ += 590.0;
  EXPECT_THAT(look(), ElementsAre("gpuXid GPU 0", "gpuXid GPU 1"));
  now_ += 10.0;
  EXPECT_THAT(look(), ElementsAre("gpuXid GPU 1"));
}

TEST_F(GpuProbe, ALibraryThatLiesIsNotBelieved) {
  set("count 4000000000\n");
  look();
  set("garbage\n\n-5 link.0 -7\n99 xid\n");
  EXPECT_NO_THROW(look());
}

TEST_F(GpuProbe, AMissingLibraryMeansNoGpusUnlessSomeAreExpected) {
  const Sysroot root(scratch_.path());
  probe_ = make_gpu_probe({.library = "/nowhere/libnvidia-ml.so.1", .sysroot = root});
  EXPECT_THAT(look(), IsEmpty());
  ASSERT_EQ(result_.measurements.size(), 1u);
  EXPECT_EQ(result_.measurements.front().name, "gpus");
  EXPECT_EQ(result_.measurements.front().value, 0.0);
  probe_ = make_gpu_probe({.library = "/nowhere/libnvidia-ml.so.1", .expected_gpus = 8});
  EXPECT_THAT(look(), ElementsAre("gpuMissing"));
  probe_ = make_gpu_probe({.library = NVML_STUB, .expected_gpus = 8});
  EXPECT_THAT(look(), ElementsAre("gpuMissing"));
}

TEST_F(GpuProbe, AMissingLibraryIsAFailureWhereThereAreGpus) {
  const std::string gpu = "sys/bus/pci/devices/0000:06:00.0/";
  const Sysroot root(scratch_.path());
  probe_ = make_gpu_probe({.library = "/nowhere/libnvidia-ml.so.1", .sysroot = root});
  data::write_file(scratch_ / (gpu + "vendor"), "0x10de\n");
  data::write_file(scratch_ / (gpu + "class"), "0x030000\n");  // a card for a display
  EXPECT_THAT(look(), IsEmpty());
  data::write_file(scratch_ / (gpu + "class"), "0x030200\n");
  expect_error([&] { look(); }, {"the node has NVIDIA's driver or GPUs, but", "/nowhere/libnvidia-ml.so.1"});
  std::filesystem::remove_all(scratch_ / "sys");
  std::filesystem::create_directories(scratch_ / "proc/driver/nvidia");
  expect_error([&] { look(); }, {"the node has NVIDIA's driver"});
}

/// Simulates an hour of polls in which every sensor moves below its limit.
TEST_F(GpuProbe, NoiseMakesNoNodeBad) {
  Judge judge("n1", {});
  for (int poll = 0; poll < 720; ++poll) {
    const int minute = poll / 12;
    set(fmt::format(
        "count 2\n0 temperature {}\n1 temperature {}\n0 power {}\n0 throttle {}\n0 link.0 1\n"
        "0 field.161.0 {}\n0 field.162.0 {}\n0 ecc 3\n0 field.230 0\n",
        60 + poll % 27, 86 - poll % 30, 300000 + 1000 * (poll % 400), poll % 3 == 0 ? 4 : 0, 8 * minute, minute / 7));
    const ProbeResult result = probe_->look(now_ += 5.0);
    const NodeVerdict verdict = judge.judge(result.findings, now_);
    ASSERT_NE(verdict.level, HealthLevel::kBad) << poll << ": " << verdict.reason;
  }
}

}  // namespace
}  // namespace tessera
