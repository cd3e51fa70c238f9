#include "data/permutation.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace tessera::data {
namespace {

constexpr std::uint32_t kStream = stream_of("test.permutation");

TEST(Permutation, IsOneToOne) {
  for (const std::uint64_t size : {1, 2, 3, 4, 5, 7, 15, 16, 17, 63, 64, 65, 255, 256, 257, 1000, 4096, 4097, 30011}) {
    for (std::uint32_t index = 0; index < 3; ++index) {
      const Permutation permutation(size, 11, kStream, index);
      std::vector<bool> seen(size, false);
      for (std::uint64_t i = 0; i < size; ++i) {
        const std::uint64_t image = permutation(i);
        ASSERT_LT(image, size);
        ASSERT_FALSE(seen[image]) << "size " << size << ": twice " << image;
        seen[image] = true;
      }
    }
  }
}

TEST(Permutation, WorksOnHugeSizes) {
  const std::uint64_t size = (std::uint64_t{1} << 62) - 3;
  const Permutation permutation(size, 1, kStream, 0);
  for (std::uint64_t i = 0; i < 100; ++i) {
    EXPECT_LT(permutation(size - 1 - i), size);
    EXPECT_NE(permutation(i), permutation(i + 1));
  }
}

std::uint64_t count_equal(const Permutation& a, const Permutation& b, std::uint64_t size) {
  std::uint64_t count = 0;
  for (std::uint64_t i = 0; i < size; ++i) count += a(i) == b(i) ? 1 : 0;
  return count;
}

TEST(Permutation, DependsOnSeedStreamAndIndex) {
  constexpr std::uint64_t kSize = 1000;
  const Permutation base(kSize, 1, kStream, 0);
  EXPECT_EQ(count_equal(base, Permutation(kSize, 1, kStream, 0), kSize), kSize);
  // Two random permutations agree in 1 place on average (Poisson). The chance of 12 or more such places is 1e-9.
  EXPECT_LT(count_equal(base, Permutation(kSize, 2, kStream, 0), kSize), 12u);
  EXPECT_LT(count_equal(base, Permutation(kSize, 1, kStream + 1, 0), kSize), 12u);
  EXPECT_LT(count_equal(base, Permutation(kSize, 1, kStream, 1), kSize), 12u);
}

// Counts where sixteenths of the positions land, over many indices. The chi-square test has 15 x 15 degrees of freedom.
TEST(Permutation, SpreadsEvenly) {
  constexpr std::uint64_t kSize = 160;
  constexpr int kNumBins = 16;
  constexpr std::uint32_t kNumIndices = 2000;
  std::vector<double> counts(kNumBins * kNumBins, 0);
  for (std::uint32_t index = 0; index < kNumIndices; ++index) {
    const Permutation permutation(kSize, 3, kStream, index);
    for (std::uint64_t i = 0; i < kSize; ++i)
      ++counts[i * kNumBins / kSize * kNumBins + permutation(i) * kNumBins / kSize];
  }
  const double expected = static_cast<double>(kSize) * kNumIndices / (kNumBins * kNumBins);
  double chi2 = 0;
  for (const double count : counts) chi2 += (count - expected) * (count - expected) / expected;
  constexpr double kFreedom = 15 * 15;
  EXPECT_LT(chi2, kFreedom + 6 * std::sqrt(2 * kFreedom));
}

}  // namespace
}  // namespace tessera::data
