#include "tensor/philox.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

using Words = std::array<std::uint32_t, 4>;

// The known answers of philox4x32-10 are from Random123.
TEST(Philox, KnownAnswers) {
  EXPECT_EQ(philox4x32({0, 0, 0, 0}, {0, 0}), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  constexpr std::uint32_t kOnes = 0xffffffff;
  EXPECT_EQ(philox4x32({kOnes, kOnes, kOnes, kOnes}, {kOnes, kOnes}),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

// Over 100,000 draws, the mean of normal numbers has a standard deviation of 0.003, and their variance one of 0.005.
// The mean of uniform numbers has one of 0.001. Bounds are five of these.
TEST(Philox, Moments) {
  const Philox random(3, stream_of("test"));
  double uniform = 0.0, normal = 0.0, squares = 0.0, cut_squares = 0.0;
  constexpr int kDraws = 100'000;
  for (std::uint64_t i = 0; i < kDraws; ++i) {
    const double u = random.uniform(i), n = random.normal(i), t = random.truncated_normal(i, 1.0);
    ASSERT_GT(u, 0.0);
    ASSERT_LT(u, 1.0);
    ASSERT_LE(std::abs(t), 1.0);
    uniform += u / kDraws;
    normal += n / kDraws;
    squares += n * n / kDraws;
    cut_squares += t * t / kDraws;
  }
  EXPECT_NEAR(uniform, 0.5, 0.005);
  EXPECT_NEAR(normal, 0.0, 0.016);
  EXPECT_NEAR(squares, 1.0, 0.025);
  EXPECT_NEAR(cut_squares, 0.29113, 0.005);  // 1 - 2·φ(1)/(Φ(1) - Φ(-1))
}

TEST(Philox, SeedsStreamsIndicesAndAttemptsDiffer) {
  const Philox random(1, 2);
  EXPECT_EQ(random.words(5), Philox(1, 2).words(5));
  EXPECT_NE(random.words(5), Philox(2, 2).words(5));
  EXPECT_NE(random.words(5), Philox(1, 3).words(5));
  EXPECT_NE(random.words(5), random.words(6));
  EXPECT_NE(random.words(5), random.words(5, 1));
  EXPECT_NE(random.words(5), random.words(5 + (std::uint64_t{1} << 32)));
}

// Means over 100,000 draws deviate by 1 / sqrt(100,000) = 0.0032 times the deviation of one draw. Bounds are five of
// these.
TEST(Philox, TailsAndIndependence) {
  const Philox random(4, stream_of("tails")), other(4, stream_of("other"));
  constexpr int kDraws = 100'000;
  double fourth = 0.0, neighbours = 0.0, streams = 0.0, beyond_two = 0.0, cut_mean = 0.0, cut_squares = 0.0;
  double before = random.normal(kDraws);
  for (std::uint64_t i = 0; i < kDraws; ++i) {
    const double n = random.normal(i), t = random.truncated_normal(i, 2.0);
    ASSERT_LE(std::abs(t), 2.0);
    ASSERT_EQ(t == n, std::abs(n) <= 2.0);  // it is drawn again only if it is beyond
    fourth += n * n * n * n / kDraws;
    neighbours += n * before / kDraws;
    streams += n * other.normal(i) / kDraws;
    beyond_two += (std::abs(n) > 2.0 ? 1.0 : 0.0) / kDraws;
    cut_mean += t / kDraws;
    cut_squares += t * t / kDraws;
    before = n;
  }
  EXPECT_NEAR(fourth, 3.0, 0.16);       // deviation of one draw: sqrt(96)
  EXPECT_NEAR(neighbours, 0.0, 0.016);  // deviation of one draw: 1
  EXPECT_NEAR(streams, 0.0, 0.016);     // deviation of one draw: 1
  EXPECT_NEAR(beyond_two, 0.0455, 0.0033);
  EXPECT_NEAR(cut_mean, 0.0, 0.014);
  EXPECT_NEAR(cut_squares, 0.77374, 0.015);  // 1 - 4·φ(2)/(Φ(2) - Φ(-2))
}

// These are FNV-1a's published values.
TEST(Philox, StreamsOfNames) {
  EXPECT_EQ(stream_of(""), 0x811c9dc5u);
  EXPECT_EQ(stream_of("a"), 0xe40c292cu);
  EXPECT_EQ(stream_of("foobar"), 0xbf9cf968u);
}

}  // namespace
}  // namespace tessera
