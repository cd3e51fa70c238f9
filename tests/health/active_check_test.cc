#include "health/active_check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

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

// A fault that only comes now and then is found in the last of many products.
TEST(ActiveCheck, WrongSumsAreCountedInTheFirstAndInTheLastProduct) {
  int num_products = 0;
  const auto damage = [&](int first, int last) {
    num_products = 0;
    return run_active_checks({.seconds = 0.05, .after_product = [&num_products, first, last](const Tensor& product) {
                                ++num_products;
                                const int num_wrong = num_products == 1 ? first : last;
                                for (int i = 0; i < num_wrong; ++i) product.data<float>()[i * 1000] += 1.0f;
                              }});
  };
  const auto expect_wrong = [](const ProbeResult& result, double num_wrong, const char* detail) {
    ASSERT_THAT(names_of(result.findings), ElementsAre("gemmWrong"));
    const Finding& finding = result.findings.front();
    EXPECT_EQ(finding.value, num_wrong);
    EXPECT_EQ(finding.evidence, EvidenceKind::kHard);
    EXPECT_THAT(finding.detail, testing::HasSubstr(detail));
  };
  expect_wrong(damage(3, 0), 3.0, "3 of 262144 sums of a known product are wrong, and 0 when it was made again");
  expect_wrong(damage(0, 2), 2.0, "0 of 262144 sums of a known product are wrong, and 2 when it was made again");
  EXPECT_GT(num_products, 1);
}

TEST(ActiveCheck, ARateIsTheFlopOfAProductOverItsTime) {
  static constexpr double kSeconds = 1.0;  // what each product takes at least, and not much more
  const double most = 2e-12 * 512 * 512 * 512 / kSeconds;
  const auto check = [&](double expected) {
    return run_active_checks({.seconds = 0.05, .expected_gemm_tflops = expected, .after_product = [](const Tensor&) {
                                std::this_thread::sleep_for(std::chrono::duration<double>(kSeconds));
                              }});
  };
  const ProbeResult result = check(0.8 * most);
  EXPECT_THAT(names_of(result.findings), ElementsAre());
  ASSERT_FALSE(result.measurements.empty());
  EXPECT_EQ(result.measurements.front().name, kGemmRateName);
  EXPECT_LE(result.measurements.front().value, most);
  EXPECT_GT(result.measurements.front().value, 0.64 * most);
  // A node that has three quarters of its peers' rate is bad.
  const ProbeResult slow = check(most / 0.75);
  ASSERT_THAT(names_of(slow.findings), ElementsAre("gemmSlow"));
  EXPECT_EQ(slow.findings.front().limit, 0.8 * most / 0.75);
}

}  // namespace
}  // namespace tessera
