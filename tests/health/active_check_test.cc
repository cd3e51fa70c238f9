#include "health/active_check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/health/findings.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;

TEST(ActiveCheck, AMachineThatWorksPasses) {
  const ProbeResult result = run_active_checks({.seconds = 0.05, .expected_gemm_tflops = 1e-6});
  EXPECT_THAT(names_of(result.findings), ElementsAre());
  ASSERT_EQ(result.measurements.size(), 2u);
  for (const Measurement& measurement : result.measurements) EXPECT_GT(measurement.value, 0.0) << measurement.name;
}

TEST(ActiveCheck, GpusThatCudaCannotUseAreBad) {
  const ProbeResult result = run_active_checks({.device = Device::kCuda, .num_gpus = 1000, .seconds = 0.05});
  EXPECT_THAT(names_of(result.findings), ElementsAre("gpuMissing"));
  EXPECT_EQ(result.findings.front().evidence, EvidenceKind::kHard);
  EXPECT_THAT(result.findings.front().detail, testing::HasSubstr("of 1000 GPUs"));
}

TEST(ActiveCheck, ASlowMachineIsBad) {
  const ProbeResult result =
      run_active_checks({.seconds = 0.05, .expected_gemm_tflops = 1e6, .expected_copy_gb_per_s = 1e6});
  EXPECT_THAT(names_of(result.findings), ElementsAre("copySlow", "gemmSlow"));
  for (const Finding& finding : result.findings) EXPECT_EQ(finding.evidence, EvidenceKind::kHard);
}

}  // namespace
}  // namespace tessera
