#include "mx/formats.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

#include "tests/mx/reference.h"
#include "tests/mx/values.h"

namespace tessera::mx {
namespace {

// The compiler gets the same answers.
static_assert(cast_to<E4M3>(448.0f) == 0x7E && cast_to<E4M3>(-448.0f) == 0xFE);
static_assert(cast_to<E4M3>(464.0f) == 0x7E && cast_to<E4M3>(kMax) == 0x7E && cast_to<E4M3>(-kInfinity) == 0xFE);
static_assert(cast_to<E4M3>(0x1p-9f) == 0x01 && cast_to<E4M3>(0x1p-10f) == 0x00);
static_assert(cast_to<E4M3>(kNaN) == 0x7F && cast_to<E4M3>(-0.0f) == 0x80);
static_assert(cast_to<E5M2>(57344.0f) == 0x7B && cast_to<E5M2>(kInfinity) == 0x7B && cast_to<E5M2>(kNaN) == 0x7F);
static_assert(value_of<E4M3>(0x7E) == 448.0f && value_of<E4M3>(0x01) == 0x1p-9f && value_of<E4M3>(0xb9) == -1.125f);
static_assert(value_of<E5M2>(0x7B) == 57344.0f && value_of<E5M2>(0x01) == 0x1p-16f);
static_assert(value_of_scale(0) == 0x1p-127f && value_of_scale(127) == 1.0f && value_of_scale(254) == 0x1p127f);
static_assert(inverse_of_scale(0) == 0x1p127f && inverse_of_scale(254) == 0x1p-127f);

template <typename Element>
class Formats : public ::testing::Test {
 protected:
  /// Returns all bytes that stand for a finite number, including zeros of both signs.
  static std::vector<std::uint8_t> finite_bytes() {
    std::vector<std::uint8_t> bytes;
    for (int code = 0; code <= reference::Definition<Element>::kLargestCode; ++code) {
      bytes.push_back(static_cast<std::uint8_t>(code));
      bytes.push_back(static_cast<std::uint8_t>(0x80 | code));
    }
    return bytes;
  }
  /// Compares the cast of a bit pattern, and of its negative, with the definition. Prints only the first failure of a
  /// test.
  void expect_nearest(std::uint32_t magnitude) {
    for (const std::uint32_t sign : {0u, 0x80000000u}) {
      const float x = float_of(magnitude | sign);
      const int expected = std::isnan(x) ? 0x7F : reference::nearest<Element>(x);
      const int byte = cast_to<Element>(x);
      if (byte != expected && ++failures_ == 1)
        ADD_FAILURE() << std::hexfloat << x << ": " << byte << ", not " << expected;
    }
    ++checked_;
  }
  std::int64_t failures_ = 0, checked_ = 0;
};
using Elements = ::testing::Types<E4M3, E5M2>;
struct ElementName {
  template <typename Element>
  static std::string GetName(int) {
    return std::is_same_v<Element, E4M3> ? "E4M3" : "E5M2";
  }
};
TYPED_TEST_SUITE(Formats, Elements, ElementName);

TYPED_TEST(Formats, CastsOfAllBFloat16) {
  for (std::uint32_t bits = 0; bits < 0x8000u; ++bits) this->expect_nearest(bits << 16);
  EXPECT_EQ(this->checked_, 0x8000);
  EXPECT_EQ(this->failures_, 0);
}

TYPED_TEST(Formats, CastsOfFloat32) {
  for (std::uint64_t bits = 0; bits <= kFloatMagnitude; bits += 1009) {
    this->expect_nearest(static_cast<std::uint32_t>(bits));
  }
  EXPECT_EQ(this->failures_, 0);
}

TYPED_TEST(Formats, CastsAroundEveryValueAndBoundary) {
  const auto& values = reference::values<TypeParam>();
  std::vector<double> places = values;
  for (std::size_t i = 1; i < values.size(); ++i) places.push_back((values[i - 1] + values[i]) / 2);
  const double step = values.back() - values[values.size() - 2];
  for (int i = 1; i <= 4; ++i) places.push_back(values.back() + i * step / 2);
  for (const double place : places) {
    const auto x = static_cast<float>(place);
    ASSERT_EQ(x, place);  // exact, so that the neighbours are those of the boundary itself
    for (int i = -64; i <= 64; ++i) {
      if (i >= 0 || bits_of(x) >= static_cast<std::uint32_t>(-i)) this->expect_nearest(bits_of(x) + i);
    }
  }
  EXPECT_EQ(this->failures_, 0);
}

TYPED_TEST(Formats, BytesKeepTheirValue) {
  for (const std::uint8_t byte : this->finite_bytes()) {
    const double magnitude = reference::value<TypeParam>(byte & 0x7f);
    const float value = value_of<TypeParam>(byte);
    EXPECT_EQ(value, byte & 0x80 ? -magnitude : magnitude) << int{byte};
    EXPECT_EQ(std::signbit(value), (byte & 0x80) != 0) << int{byte};
    EXPECT_EQ(cast_to<TypeParam>(value), byte);
  }
}

TYPED_TEST(Formats, LimitsAndSpecialNumbers) {
  using D = reference::Definition<TypeParam>;
  EXPECT_EQ(value_of<TypeParam>(D::kLargestCode), D::kLargest);
  EXPECT_EQ(TypeParam::kLargest, D::kLargestCode);
  EXPECT_EQ(TypeParam::kLargestValue, D::kLargest);
  EXPECT_EQ(TypeParam::kMaxExponent, std::ilogb(D::kLargest));
  EXPECT_EQ(float_of(TypeParam::kReciprocal), static_cast<float>(1.0 / D::kLargest));
  for (const float x : {std::nextafter(TypeParam::kLargestValue, kInfinity), kMax, kInfinity}) {
    EXPECT_EQ(cast_to<TypeParam>(x), D::kLargestCode);
    EXPECT_EQ(cast_to<TypeParam>(-x), 0x80 | D::kLargestCode);
  }
  // All of these are NaN, including signalling and negative ones.
  for (const std::uint32_t bits : {0x7fc00000u, 0xffc00000u, 0x7f800001u, 0xff800001u, 0x7fffffffu, 0xffffffffu}) {
    EXPECT_EQ(cast_to<TypeParam>(float_of(bits)), 0x7F) << std::hex << bits;
  }
  EXPECT_EQ(cast_to<TypeParam>(0.0f), 0x00);
  EXPECT_EQ(cast_to<TypeParam>(-0.0f), 0x80);
  EXPECT_EQ(cast_to<TypeParam>(-std::numeric_limits<float>::denorm_min()), 0x80);
}

TEST(Formats, SpecialBytesOfE4M3) {
  EXPECT_TRUE(std::isnan(value_of<E4M3>(0x7f)));
  EXPECT_TRUE(std::isnan(value_of<E4M3>(0xff)));
}

TEST(Formats, SpecialBytesOfE5M2) {
  EXPECT_EQ(value_of<E5M2>(0x7C), kInfinity);
  EXPECT_EQ(value_of<E5M2>(0xFC), -kInfinity);
  for (const int byte : {0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF}) {
    EXPECT_TRUE(std::isnan(value_of<E5M2>(static_cast<std::uint8_t>(byte)))) << byte;
  }
}

// Checkpoints have such bytes of E4M3. A reader of DeepSeek's FP8 weights must give these values.
TEST(Formats, BytesOfE4M3ByHand) {
  EXPECT_EQ(value_of<E4M3>(0x00), 0.0f);
  EXPECT_TRUE(std::signbit(value_of<E4M3>(0x80)));
  EXPECT_EQ(value_of<E4M3>(0x01), 0x1p-9f);
  EXPECT_EQ(value_of<E4M3>(0x07), 7 * 0x1p-9f);
  EXPECT_EQ(value_of<E4M3>(0x08), 0x1p-6f);
  EXPECT_EQ(value_of<E4M3>(0x38), 1.0f);
  EXPECT_EQ(value_of<E4M3>(0xb9), -1.125f);
  EXPECT_EQ(value_of<E4M3>(0x7e), 448.0f);
}

TEST(Formats, E8M0) {
  for (int s = 0; s <= 254; ++s) {
    const auto byte = static_cast<std::uint8_t>(s);
    EXPECT_EQ(value_of_scale(byte), std::ldexp(1.0, s - 127)) << s;
    EXPECT_EQ(inverse_of_scale(byte), std::ldexp(1.0, 127 - s)) << s;
  }
  EXPECT_TRUE(std::isnan(value_of_scale(0xFF)));
  EXPECT_EQ(kScaleNaN, 0xFF);
}

}  // namespace
}  // namespace tessera::mx
