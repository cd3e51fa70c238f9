// A second implementation of the formats and scales, from their definitions. Values are sums of powers of two in
// float64, which holds all of them exactly, and searches replace arithmetic on bits. Also provides the numbers on which
// tests compare the core with this implementation.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "mx/block.h"

namespace tessera::mx::reference {

// Source: OCP 8-bit Floating Point v1.0, table 1. The numbers are written out again, not taken from the core's traits.
template <typename Element>
struct Definition;
template <>
struct Definition<E4M3> {
  static constexpr int kMantissaBits = 3, kBias = 7, kLargestCode = 0x7E, kMaxExponent = 8;
  static constexpr double kLargest = 448.0;
};
template <>
struct Definition<E5M2> {
  static constexpr int kMantissaBits = 2, kBias = 15, kLargestCode = 0x7B, kMaxExponent = 15;
  static constexpr double kLargest = 57344.0;
};

/// Returns the value of a code without sign, from 0 to the largest finite one.
template <typename Element>
double value(int code) {
  using D = Definition<Element>;
  const int exponent = code >> D::kMantissaBits, mantissa = code & ((1 << D::kMantissaBits) - 1);
  const double fraction = std::ldexp(mantissa, -D::kMantissaBits);
  return exponent == 0 ? std::ldexp(fraction, 1 - D::kBias) : std::ldexp(1.0 + fraction, exponent - D::kBias);
}

/// Returns all finite values that are not negative, in ascending order. The index of a value is its code.
template <typename Element>
const std::vector<double>& values() {
  static const std::vector<double> all = [] {
    std::vector<double> v;
    for (int code = 0; code <= Definition<Element>::kLargestCode; ++code) v.push_back(value<Element>(code));
    return v;
  }();
  return all;
}

/// Returns the byte of the value nearest to x. Of two equally near values it takes the even code. Beyond the largest
/// value it takes the largest.
template <typename Element>
std::uint8_t nearest(double x) {
  if (std::isnan(x)) return 0x7F;
  const auto& v = values<Element>();
  const double magnitude = std::abs(x);
  auto code = std::lower_bound(v.begin(), v.end(), magnitude) - v.begin();  // the first value >= magnitude
  if (code == static_cast<std::ptrdiff_t>(v.size())) {
    --code;
  } else if (code > 0) {
    const double above = v[code] - magnitude, below = magnitude - v[code - 1];  // exact
    if (below < above || (below == above && code % 2 == 1)) --code;
  }
  return static_cast<std::uint8_t>((std::signbit(x) ? 0x80 : 0) | code);
}

/// Returns the smallest byte s with x <= unit · 2^(s - 127). Both products are exact.
inline int smallest_scale(double x, double unit) {
  int s = std::max(0, std::ilogb(x / unit) + 126);  // a start that is not too large
  while (s > 0 && std::ldexp(unit, s - 1 - 127) >= x) --s;
  while (std::ldexp(unit, s - 127) < x) ++s;
  return s;
}

/// Returns the smallest scale byte with which no number up to amax lies beyond the element's largest value, in real
/// numbers.
template <typename Element>
int scale_that_clips_nothing(float amax) {
  return amax == 0.0f ? 0 : smallest_scale(amax, Definition<Element>::kLargest);
}

template <typename Element>
int scale(float amax, ScalingMode mode) {
  using D = Definition<Element>;
  if (amax == 0.0f) return 0;
  const double x = amax;
  int exponent = std::ilogb(x);  // floor(log2 x), also for subnormal float32
  switch (mode) {
    case ScalingMode::kFloor:
      break;
    case ScalingMode::kCeil:
      if (std::ldexp(1.0, exponent) != x) ++exponent;
      break;
    case ScalingMode::kEven:
      exponent += std::ilogb(std::nearbyint(std::ldexp(x, D::kMantissaBits - exponent))) - D::kMantissaBits;
      break;
    case ScalingMode::kRceil: {
      // The product of two 24-bit numbers is exact in float64, so this rounds once, to float32.
      const double reciprocal = static_cast<float>(1.0 / D::kLargest);
      const auto v = static_cast<float>(x * reciprocal);
      return v == 0.0f ? 0 : smallest_scale(v, 1.0);
    }
  }
  return std::max(0, exponent - D::kMaxExponent + 127);
}

/// Returns the bytes that an MXFP8 block must have: its elements, and then its scale.
template <typename Element>
std::vector<std::uint8_t> quantize(const std::vector<float>& x, ScalingMode mode) {
  float amax = 0.0f;
  for (const float number : x) {
    if (!std::isfinite(number)) {
      std::vector<std::uint8_t> bytes(x.size(), 0x7F);
      bytes.push_back(0xFF);
      return bytes;
    }
    amax = std::max(amax, std::abs(number));
  }
  const int s = scale<Element>(amax, mode);
  std::vector<std::uint8_t> bytes;
  for (const float number : x) bytes.push_back(nearest<Element>(std::ldexp(static_cast<double>(number), 127 - s)));
  bytes.push_back(static_cast<std::uint8_t>(s));
  return bytes;
}

/// Returns bit patterns of finite float32 numbers that are not negative, in ascending order. They are every 1009th, all
/// of bfloat16's, and the neighbourhoods of all numbers at which a mode's scale changes.
inline const std::vector<std::uint32_t>& magnitudes() {
  static const std::vector<std::uint32_t> all = [] {
    std::vector<std::uint32_t> bits;
    for (std::uint32_t b = 0; b < kFloatInfinity; b += 1009) bits.push_back(b);
    for (std::uint32_t b = 0; b < kFloatInfinity; b += 1u << 16) bits.push_back(b);
    // The significands are those of powers of two, of the elements' largest values (1.75), and of kEven's limits for
    // E5M2 (1.875) and E4M3 (1.9375). Subnormal numbers are among them.
    for (int exponent = -149; exponent < 128; ++exponent) {
      for (const double significand : {1.0, 1.75, 1.875, 1.9375}) {
        const std::uint32_t at = bits_of(static_cast<float>(std::ldexp(significand, exponent)));
        for (std::uint32_t b = at < 4 ? 0 : at - 4; b <= at + 4 && b < kFloatInfinity; ++b) bits.push_back(b);
      }
    }
    for (std::uint32_t b = kFloatInfinity - 4; b < kFloatInfinity; ++b) bits.push_back(b);
    std::sort(bits.begin(), bits.end());
    bits.erase(std::unique(bits.begin(), bits.end()), bits.end());
    return bits;
  }();
  return all;
}

}  // namespace tessera::mx::reference
