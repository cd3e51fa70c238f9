#include "model/rope_table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

namespace tessera {
namespace {

/// Returns the angle by which pair i turns per position, from the table's second row.
double frequency(const RopeTable& table, std::int64_t i) {
  const std::int64_t pairs = table.cos(Device::kCpu).dim(1);
  return std::atan2(table.sin(Device::kCpu).data<float>()[pairs + i], table.cos(Device::kCpu).data<float>()[pairs + i]);
}

TEST(RopeTable, PlainFrequencies) {
  const ModelConfig config;
  const RopeTable table(config, 4096);
  for (std::int64_t i = 0; i < 32; ++i) {
    EXPECT_NEAR(frequency(table, i), std::pow(10000.0, -2.0 * static_cast<double>(i) / 64.0), 1e-7) << i;
  }
}

// These are DeepSeek-V3's numbers. Pairs below 10 keep their frequency. From pair 23 on it is divided by 40, and the
// pairs between are blended.
TEST(RopeTable, YarnBeyondTheOriginalLength) {
  const ModelConfig config;
  const RopeTable plain(config, 4096), yarn(config, 4097);
  for (std::int64_t i = 0; i < 32; ++i) {
    const double slowed = std::clamp((static_cast<double>(i) - 10.0) / 13.0, 0.0, 1.0);
    EXPECT_NEAR(frequency(yarn, i), frequency(plain, i) * (1.0 - slowed + slowed / 40.0), 1e-7) << i;
  }
}

TEST(SoftmaxScale, YarnCorrectionBeyondTheOriginalLength) {
  const ModelConfig config;
  EXPECT_FLOAT_EQ(config.softmax_scale(4096), 1.0f / std::sqrt(192.0f));
  const float m = 0.1f * 0.7f * std::log(40.0f) + 1.0f;
  EXPECT_FLOAT_EQ(config.softmax_scale(4097), m * m / std::sqrt(192.0f));
}

}  // namespace
}  // namespace tessera
