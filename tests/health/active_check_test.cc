#include "health/active_check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "tests/expect_error.h"
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

TEST(ActiveCheck, AGpuThatFailsIsBadAndTheOthersAreMeasured) {
  const ProbeResult result = check_gpus(3, [](int gpu) -> ProbeResult {
    TESSERA_CHECK(gpu != 0, "an uncorrectable ECC error");
    return {.measurements = {{.name = kGemmRateName, .value = 10.0 * gpu}}};
  });
  EXPECT_THAT(names_of(result.findings), ElementsAre("gpuFailed GPU 0"));
  EXPECT_EQ(result.findings.front().evidence, EvidenceKind::kHard);
  EXPECT_THAT(result.findings.front().detail, testing::HasSubstr("an uncorrectable ECC error"));
  ASSERT_EQ(result.measurements.size(), 1u);
  EXPECT_EQ(result.measurements.front().value, 10.0);
  expect_error([] { check_gpus(2, [](int gpu) -> ProbeResult { fail("GPU {} has no memory", gpu); }); },
               {"GPU 0 has no memory"});
}

TEST(ActiveCheck, ASlowMachineIsBad) {
  const ProbeResult result =
      run_active_checks({.seconds = 0.05, .expected_gemm_tflops = 1e6, .expected_copy_gb_per_s = 1e6});
  EXPECT_THAT(names_of(result.findings), ElementsAre("copySlow", "gemmSlow"));
  for (const Finding& finding : result.findings) EXPECT_EQ(finding.evidence, EvidenceKind::kHard);
}

}  // namespace
}  // namespace tessera
