#include <gtest/gtest.h>

#include "ops/runtime/kernel_profile.h"

namespace tessera::cuda {
namespace {

TEST(KernelSummary, SumsByNameAndCountsIdleTimeOnce) {
  const std::vector<KernelRun> runs = {
      {"a", 100, 200}, {"b", 150, 180}, {"a", 190, 250}, {"c", 300, 301}};  // b runs within a, and a overlaps a
  const KernelSummary summary = summarize(runs);
  EXPECT_EQ(summary.span, 201);
  EXPECT_EQ(summary.busy, 151);
  ASSERT_EQ(summary.kernels.size(), 3u);
  EXPECT_EQ(summary.kernels[0].name, "a");
  EXPECT_EQ(summary.kernels[0].num_runs, 2u);
  EXPECT_EQ(summary.kernels[0].nanoseconds, 160);
  EXPECT_EQ(summary.kernels[0].idle_before, 0);
  EXPECT_EQ(summary.kernels[2].name, "c");
  EXPECT_EQ(summary.kernels[2].idle_before, 50);
}

TEST(KernelSummary, OfNothingIsNothing) {
  EXPECT_EQ(summarize({}).span, 0);
  EXPECT_TRUE(summarize({}).kernels.empty());
}

}  // namespace
}  // namespace tessera::cuda
