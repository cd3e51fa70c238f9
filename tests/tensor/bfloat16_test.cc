#include "tensor/bfloat16.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "tensor/philox.h"

namespace tessera {
namespace {

BFloat16 from_bits(std::uint32_t bits) { return std::bit_cast<BFloat16>(static_cast<std::uint16_t>(bits)); }
double value(std::uint32_t bits) { return static_cast<double>(static_cast<float>(from_bits(bits))); }

TEST(BFloat16, EveryValueComesBack) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto wide = static_cast<float>(from_bits(bits));
    if (std::isnan(wide)) {
      EXPECT_TRUE(std::isnan(static_cast<float>(BFloat16(wide)))) << bits;
    } else {
      EXPECT_EQ(BFloat16(wide).bits, bits);
    }
  }
}

// The expected result is the nearer of the two neighbours in float64, with ties to the even one. x is positive and
// finite. Its negative must round to the same magnitude.
TEST(BFloat16, RoundsToNearestEven) {
  // Subnormals are included; 0x7f7f is the largest finite number.
  for (std::uint32_t bits = 0; bits < 0x7f7f; bits += 7) {
    const double below = value(bits), above = value(bits + 1);
    for (const std::uint32_t rest : {0x0001u, 0x3fffu, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      const auto x = std::bit_cast<float>((bits << 16) | rest);
      const double down = static_cast<double>(x) - below, up = above - static_cast<double>(x);
      const std::uint32_t expected = down < up || (down == up && bits % 2 == 0) ? bits : bits + 1;
      EXPECT_EQ(BFloat16(x).bits, expected);
      EXPECT_EQ(BFloat16(-x).bits, expected | 0x8000u);
    }
  }
}

TEST(BFloat16, BeyondTheRange) {
  EXPECT_EQ(BFloat16(std::numeric_limits<float>::infinity()).bits, 0x7f80);
  EXPECT_EQ(BFloat16(std::numeric_limits<float>::max()).bits, 0x7f80);
  EXPECT_TRUE(std::isnan(static_cast<float>(BFloat16(std::bit_cast<float>(0x7f800001u)))));  // a NaN of low bits only
}

// Draws floats with any bits. The expected result is rounded in float64 to a multiple of the last place of 8
// significant bits. Below 2^-126 it is the last place of subnormals.
TEST(BFloat16, AnyFloatAgainstArithmetic) {
  const Philox philox(1, 1);
  for (std::uint64_t i = 0; i < 200'000; ++i) {
    const auto x = std::bit_cast<float>(philox.words(i)[0]);
    const BFloat16 rounded(x);
    const auto actual = static_cast<double>(static_cast<float>(rounded));
    if (std::isnan(x)) {
      ASSERT_TRUE(std::isnan(actual));
      ASSERT_EQ(rounded.bits >> 15, std::signbit(x) ? 1 : 0);
      continue;
    }
    const auto wide = static_cast<double>(x);
    const int exponent = wide == 0.0 || std::isinf(wide) ? -126 : std::max(std::ilogb(wide), -126);
    const double place = std::ldexp(1.0, exponent - 7);
    double expected = std::nearbyint(wide / place) * place;
    if (std::abs(expected) >= 0x1p128) expected = std::copysign(HUGE_VAL, wide);
    ASSERT_EQ(actual, expected) << wide;
    ASSERT_EQ(std::signbit(actual), std::signbit(wide));
  }
}

TEST(BFloat16, ZerosKeepTheirSigns) {
  EXPECT_EQ(BFloat16(0.0f).bits, 0x0000);
  EXPECT_EQ(BFloat16(-0.0f).bits, 0x8000);
  EXPECT_EQ(BFloat16(-std::numeric_limits<float>::denorm_min()).bits, 0x8000);
  EXPECT_EQ(BFloat16(-std::numeric_limits<float>::infinity()).bits, 0xff80);
}

}  // namespace
}  // namespace tessera
