#include "mx/block.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <string>
#include <vector>

#include "mx/quantized.h"
#include "tensor/philox.h"
#include "tests/mx/reference.h"
#include "tests/mx/values.h"

namespace tessera::mx {
namespace {

constexpr std::array kNames = {"floor", "rceil", "ceil", "even"};

struct Cast {
  std::uint8_t scale, element;
  bool operator==(const Cast&) const = default;
};

template <typename Element = E4M3>
constexpr Cast cast_alone(float x, ScalingMode mode) {
  Cast cast{};
  cast.scale = quantize_block<Element>(&x, 1, mode, &cast.element);
  return cast;
}

// These cases are worked out by hand. The compiler checks them here, and a test checks them at run time.
struct Check {
  float x;
  ScalingMode mode;
  Cast expected;
};
constexpr Check kChecks[] = {
    {448.0f, ScalingMode::kFloor, {127, 0x7E}},
    {448.0f, ScalingMode::kRceil, {127, 0x7E}},
    {448.0f, ScalingMode::kCeil, {128, 0x76}},   // 256 < 448: 224 · 2
    {448.0f, ScalingMode::kEven, {127, 0x7E}},   // 1.75 has three bits
    {480.0f, ScalingMode::kFloor, {127, 0x7E}},  // clipped
    {480.0f, ScalingMode::kRceil, {128, 0x77}},  // 240 · 2
    {480.0f, ScalingMode::kCeil, {128, 0x77}},
    {480.0f, ScalingMode::kEven, {127, 0x7E}},   // 1.875 has three bits: clipped
    {496.0f, ScalingMode::kEven, {128, 0x78}},   // 1.9375 rounds to 2; 248 is halfway to 256
    {600.0f, ScalingMode::kFloor, {128, 0x79}},  // 300 rounds to 288
    {600.0f, ScalingMode::kRceil, {128, 0x79}},
    {600.0f, ScalingMode::kCeil, {129, 0x71}},
    {600.0f, ScalingMode::kEven, {128, 0x79}},
    {kMax, ScalingMode::kFloor, {246, 0x7E}},
    {kMax, ScalingMode::kRceil, {247, 0x78}},
    {0x1p-126f, ScalingMode::kFloor, {0, 0x40}},
    {0x1p-126f, ScalingMode::kRceil, {0, 0x40}},
    {0x1p-149f, ScalingMode::kRceil, {0, 0x00}},  // 2^-22, below half of 2^-9
    {0.0f, ScalingMode::kRceil, {0, 0x00}},
    {-0.0f, ScalingMode::kRceil, {0, 0x80}},
    {kInfinity, ScalingMode::kRceil, {0xFF, 0x7F}},
    {-kInfinity, ScalingMode::kFloor, {0xFF, 0x7F}},
    {kNaN, ScalingMode::kRceil, {0xFF, 0x7F}},
};
constexpr bool all_hold() {
  for (const Check& check : kChecks) {
    if (cast_alone(check.x, check.mode) != check.expected) return false;
  }
  return true;
}
static_assert(all_hold());

TEST(Block, ScalesOfSingleNumbers) {
  for (const Check& check : kChecks) {
    const Cast cast = cast_alone(check.x, check.mode);
    EXPECT_EQ(cast, check.expected) << check.x << ' ' << kNames[static_cast<std::size_t>(check.mode)] << ": "
                                    << int{cast.scale} << ' ' << int{cast.element};
  }
}

template <typename Element>
void expect_scales_as_defined() {
  for (const ScalingMode mode : kModes) {
    SCOPED_TRACE(kNames[static_cast<std::size_t>(mode)]);
    int previous = 0;
    for (const std::uint32_t bits : reference::magnitudes()) {
      const float amax = float_of(bits);
      const int s = scale_byte<Element>(amax, mode);
      ASSERT_EQ(s, reference::scale<Element>(amax, mode)) << std::hexfloat << amax;
      ASSERT_LE(previous, s) << "not monotone at " << std::hexfloat << amax;
      previous = s;
    }
  }
}
TEST(Block, ScalesAsDefinedE4M3) { expect_scales_as_defined<E4M3>(); }
TEST(Block, ScalesAsDefinedE5M2) { expect_scales_as_defined<E5M2>(); }

template <typename Element>
void expect_rceil_is_the_smallest_that_clips_nothing() {
  constexpr double kLargest = reference::Definition<Element>::kLargest;
  int exceptions = 0;
  for (const std::uint32_t bits : reference::magnitudes()) {
    const float amax = float_of(bits);
    const int s = scale_byte<Element>(amax, ScalingMode::kRceil);
    const int smallest = reference::scale_that_clips_nothing<Element>(amax);
    if (s == smallest) continue;
    // amax / 448 is rounded to a multiple of 2^-149, so amax can be a little too large for 2^-127. It is then rounded
    // to 448 · 2^-127 anyway.
    ++exceptions;
    ASSERT_EQ(s, 0) << std::hexfloat << amax;
    ASSERT_EQ(smallest, 1);
    ASSERT_LE(amax, std::ldexp(kLargest, -127) * (1 + 0x1p-23)) << std::hexfloat << amax;
    ASSERT_EQ(reference::nearest<Element>(std::ldexp(static_cast<double>(amax), 127)), Element::kLargest);
  }
  EXPECT_EQ(exceptions, 1);  // the float32 after 448 · 2^-127
}
TEST(Block, RceilIsTheSmallestScaleThatClipsNothingE4M3) { expect_rceil_is_the_smallest_that_clips_nothing<E4M3>(); }
TEST(Block, RceilIsTheSmallestScaleThatClipsNothingE5M2) { expect_rceil_is_the_smallest_that_clips_nothing<E5M2>(); }

TEST(Block, WhichModesClip) {
  std::array<int, 4> clipped{};
  for (const std::uint32_t bits : reference::magnitudes()) {
    const double amax = float_of(bits);
    for (std::size_t i = 0; i < kModes.size(); ++i) {
      const int s = scale_byte(float_of(bits), kModes[i]);
      if (s > 0 && amax > std::ldexp(448.0, s - 127)) ++clipped[i];
    }
  }
  EXPECT_GT(clipped[0], 0);  // floor
  EXPECT_EQ(clipped[1], 0);  // rceil
  EXPECT_EQ(clipped[2], 0);  // ceil
  EXPECT_GT(clipped[3], 0);  // even
  EXPECT_LT(clipped[3], clipped[0]);
}

/// Returns a block of random numbers. Their exponents are less than `spread` below `top`, and a few numbers are zero.
std::vector<float> random_block(const Philox& random, std::uint64_t block, int count) {
  const auto choice = random.words(block << 8);
  const int top = static_cast<int>(choice[0] % 278) - 150, spread = 1 + static_cast<int>(choice[1] % 24);
  std::vector<float> x;
  for (int i = 0; i < count; ++i) {
    const auto w = random.words(block << 8 | static_cast<std::uint64_t>(i + 1));
    const double significand = 1.0 + (w[0] >> 9) * 0x1p-23;
    const double magnitude = w[1] % 16 == 0 ? 0.0 : std::ldexp(significand, top - static_cast<int>(w[2] % spread));
    x.push_back(static_cast<float>(w[3] % 2 == 0 ? magnitude : -magnitude));
  }
  return x;
}

template <typename Element>
std::vector<std::uint8_t> quantize(const std::vector<float>& x, ScalingMode mode) {
  std::vector<std::uint8_t> bytes(x.size() + 1);
  bytes.back() = quantize_block<Element>(x.data(), static_cast<std::int64_t>(x.size()), mode, bytes.data());
  return bytes;
}

TEST(Block, BlocksAsDefined) {
  const Philox random(1, stream_of("blocks"));
  for (std::uint64_t block = 0; block < 20000; ++block) {
    const auto x = random_block(random, block, block % 4 == 0 ? 1 + static_cast<int>(block / 4 % 128) : kBlock);
    for (const ScalingMode mode : kModes) {
      ASSERT_EQ(quantize<E4M3>(x, mode), reference::quantize<E4M3>(x, mode)) << "block " << block;
      ASSERT_EQ(quantize<E5M2>(x, mode), reference::quantize<E5M2>(x, mode)) << "block " << block;
    }
  }
}

// A float32 number that is small after scaling passes through a subnormal product. No bit that counts may be lost
// there.
TEST(Block, SmallNumbersBesideLargeOnes) {
  for (const float amax : {kMax, 0x1p127f, 448.0f, 0x1p-100f, 0x1p-118f, 0x1p-126f}) {
    for (int exponent = -149; exponent < 128; ++exponent) {
      for (const double significand : {1.0, 1.25, 1.5, 1.5 + 0x1p-23, 1.5 - 0x1p-23, 1.9375}) {
        const auto x = static_cast<float>(std::ldexp(significand, exponent));
        if (x > amax) continue;
        const std::vector<float> block = {x, -x, amax};
        for (const ScalingMode mode : kModes) {
          ASSERT_EQ(quantize<E4M3>(block, mode), reference::quantize<E4M3>(block, mode)) << std::hexfloat << x;
          ASSERT_EQ(quantize<E5M2>(block, mode), reference::quantize<E5M2>(block, mode)) << std::hexfloat << x;
        }
      }
    }
  }
}

TEST(Block, OneNumberThatIsNotFinite) {
  for (const std::size_t count : {std::size_t{1}, std::size_t{5}, std::size_t{32}}) {
    std::vector<float> x(count, 1.0f);
    std::vector<std::uint8_t> expected(count, 0x7F);
    expected.push_back(0xFF);
    for (std::size_t i = 0; i < count; ++i) {
      for (const std::uint32_t bits : {0x7f800000u, 0xff800000u, 0x7fc00000u, 0xffc00000u, 0x7f800001u, 0xffffffffu}) {
        x[i] = float_of(bits);
        for (const ScalingMode mode : kModes) {
          EXPECT_EQ(quantize<E4M3>(x, mode), expected) << i << ' ' << std::hex << bits;
          EXPECT_EQ(quantize<E5M2>(x, mode), expected) << i << ' ' << std::hex << bits;
        }
      }
      x[i] = kMax;  // a finite number
      EXPECT_EQ(quantize<E4M3>(x, ScalingMode::kRceil).back(), 247);
      x[i] = 1.0f;
    }
  }
}

TEST(Block, Zeros) {
  for (const ScalingMode mode : kModes) {
    EXPECT_EQ(quantize<E4M3>(std::vector<float>(32, 0.0f), mode), std::vector<std::uint8_t>(33, 0));
    EXPECT_EQ(quantize<E4M3>({-0.0f, 0.0f}, mode), (std::vector<std::uint8_t>{0x80, 0, 0}));
    EXPECT_EQ(quantize<E4M3>({}, mode), std::vector<std::uint8_t>{0});
  }
}

// A block that the matrix cuts off counts as if it were filled with zeros.
TEST(Block, ShortBlocksAreBlocksWithZeros) {
  const Philox random(2, stream_of("short"));
  for (int count = 1; count < kBlock; ++count) {
    const auto x = random_block(random, static_cast<std::uint64_t>(count), count);
    auto filled = x;
    filled.resize(kBlock, 0.0f);
    for (const ScalingMode mode : kModes) {
      auto expected = quantize<E4M3>(filled, mode);
      expected.erase(expected.begin() + count, expected.end() - 1);
      EXPECT_EQ(quantize<E4M3>(x, mode), expected) << count;
    }
  }
}

TEST(Block, LargestMagnitude) {
  const std::vector<float> x = {1.0f, -5.0f, 2.0f, 3.0f, -4.0f, kNaN};
  EXPECT_EQ(block_amax(x.data(), 5), 5.0f);
  EXPECT_EQ(block_amax(x.data(), 3, 2), 4.0f);  // the column 1, 2, -4
  EXPECT_EQ(block_amax(x.data(), 1), 1.0f);
  EXPECT_EQ(block_amax(x.data(), 0), 0.0f);
  EXPECT_EQ(block_amax(x.data(), 6), kInfinity);
  EXPECT_EQ(block_amax(x.data() + 1, 3, 2), kInfinity);  // -5, 3, NaN
  const float tiny[] = {-0x1p-149f, 0.0f};
  EXPECT_EQ(block_amax(tiny, 2), 0x1p-149f);
}

TEST(Block, FloatScales) {
  for (const std::uint32_t bits : reference::magnitudes()) {
    const float amax = float_of(bits);
    const double counted = std::max<double>(amax, 0x1p-100);
    const float scale = float_scale(amax), inverse = inverse_float_scale(amax);
    // The rounding to float64 does no harm here.
    ASSERT_EQ(scale, static_cast<float>(counted / 448.0)) << std::hexfloat << amax;
    ASSERT_EQ(inverse, static_cast<float>(448.0 / counted)) << std::hexfloat << amax;
    ASSERT_TRUE(std::isnormal(scale) && std::isnormal(inverse)) << std::hexfloat << amax;
    // The block's largest number becomes the largest element.
    if (amax >= 0x1p-100f) {
      ASSERT_EQ(cast_to<E4M3>(amax * inverse), 0x7E) << std::hexfloat << amax;
    }
  }
  EXPECT_EQ(float_scale(448.0f), 1.0f);
  EXPECT_EQ(float_scale(0.0f), 0x1p-100f / 448.0f);
  EXPECT_EQ(cast_to<E4M3>(0.0f * inverse_float_scale(0.0f)), 0);
  // A block with infinity or NaN has an infinite largest magnitude. No finite number comes out of it.
  for (const float x : {1.0f, -0.0f, kInfinity, kNaN}) {
    const float product = value_of<E4M3>(cast_to<E4M3>(x * inverse_float_scale(kInfinity))) * float_scale(kInfinity);
    EXPECT_TRUE(std::isnan(product)) << x;
  }
}

TEST(Quantized, ShapesOfScales) {
  const Format mx{}, square{.along = 32, .across = 32}, wide{.along = 128}, wide_square{.along = 128, .across = 128};
  const Format rows{.scale_type = ScaleType::kFloat32, .along = 128};
  const Format tiles{.scale_type = ScaleType::kFloat32, .along = 128, .across = 128};
  for (const Format& format : {mx, square, wide, wide_square}) {  // each has one scale for each row and 32 numbers
    EXPECT_EQ(scales_shape({130, 300}, format), (Shape{130, 10}));
    EXPECT_EQ(scales_shape({3, 128, 256}, format), (Shape{3, 128, 8}));
    EXPECT_EQ(scales_dtype(format), DType::kFloat8E8M0);
  }
  EXPECT_EQ(scales_shape({130, 300}, rows), (Shape{130, 3}));
  EXPECT_EQ(scales_shape({130, 300}, tiles), (Shape{2, 3}));
  EXPECT_EQ(scales_shape({5, 128, 256}, tiles), (Shape{5, 1, 2}));
  EXPECT_EQ(scales_dtype(tiles), DType::kFloat32);
  EXPECT_FALSE(mx.square() || wide.square() || rows.square());
  EXPECT_TRUE(square.square() && wide_square.square() && tiles.square());
}

/// Computes the ratio of signal to quantization noise, in dB.
class Sqnr {
 public:
  void add(double x, double quantized) {
    signal_ += x * x;
    noise_ += (x - quantized) * (x - quantized);
  }
  double decibel() const { return 10.0 * std::log10(signal_ / noise_); }

 private:
  double signal_ = 0.0, noise_ = 0.0;
};

template <typename Element>
double sqnr_of_gaussian(std::size_t along, ScalingMode mode) {
  constexpr std::size_t kRows = 64, kColumns = 4096;
  const Philox random(3, stream_of("sqnr"));
  Sqnr sqnr;
  std::vector<float> x(along);
  for (std::size_t at = 0; at < kRows * kColumns; at += along) {
    for (std::size_t i = 0; i < along; ++i) x[i] = static_cast<float>(random.normal(at + i));
    const auto bytes = quantize<Element>(x, mode);
    const double scale = value_of_scale(bytes.back());
    for (std::size_t i = 0; i < along; ++i) sqnr.add(x[i], value_of<Element>(bytes[i]) * scale);
  }
  return sqnr.decibel();
}

double sqnr_with_float_scales(std::size_t along) {
  const Philox random(3, stream_of("sqnr"));
  Sqnr sqnr;
  std::vector<float> x(along);
  for (std::size_t at = 0; at < 64 * 4096; at += along) {
    for (std::size_t i = 0; i < along; ++i) x[i] = static_cast<float>(random.normal(at + i));
    const float amax = block_amax(x.data(), static_cast<std::int64_t>(along));
    for (const float number : x) {
      const float element = value_of<E4M3>(cast_to<E4M3>(number * inverse_float_scale(amax)));
      sqnr.add(number, static_cast<double>(element) * float_scale(amax));
    }
  }
  return sqnr.decibel();
}

// Quantizes 64 rows of 4096 standard normal numbers. docs/mxfp8.md has these figures.
TEST(Block, SignalToNoise) {
  const double rceil = sqnr_of_gaussian<E4M3>(32, ScalingMode::kRceil);
  EXPECT_GE(rceil, 31.0);
  for (std::size_t i = 0; i < kModes.size(); ++i) {
    const double e4m3 = sqnr_of_gaussian<E4M3>(32, kModes[i]), wide = sqnr_of_gaussian<E4M3>(128, kModes[i]);
    const double e5m2 = sqnr_of_gaussian<E5M2>(32, kModes[i]);
    std::printf("SQNR, %-5s  1x32 %.2f dB  1x128 %.2f dB  E5M2 1x32 %.2f dB\n", kNames[i], e4m3, wide, e5m2);
    // Clipping costs some dB, and a bit of mantissa costs 6 dB.
    EXPECT_LE(e4m3, rceil + 0.5);
    EXPECT_NEAR(e4m3 - e5m2, 6.0, 1.0);
  }
  const double floats = sqnr_with_float_scales(128);
  std::printf("SQNR, float32 scales 1x128 %.2f dB\n", floats);
  EXPECT_GE(floats, 31.0);
}

}  // namespace
}  // namespace tessera::mx
