// The number formats of MXFP8 (OCP Microscaling Formats v1.0, sec. 5; OCP 8-bit Floating Point v1.0), as bytes.
//
//   E4M3  s eeee mmm   bias 7    largest 448 = 0x7E     no infinity   NaN 0x7F, 0xFF
//   E5M2  s eeeee mm   bias 15   largest 57344 = 0x7B   Inf 0x7C      NaN 0x7D-0x7F
//   E8M0  eeeeeeee     bias 127  2^(s-127), s <= 254    no zero       NaN 0xFF
//
// Casts from float32 round to nearest even, also to subnormal results, and saturate: larger magnitudes, infinities
// included, become the largest number. NaN becomes 0x7F. Zeros keep their sign.
#pragma once

#include <cstdint>

#include "base/host_device.h"

namespace tessera::mx {

// The fields of a float32.
inline constexpr std::uint32_t kFloatMagnitude = 0x7fffffffu;
inline constexpr std::uint32_t kFloatMantissa = 0x007fffffu;
inline constexpr std::uint32_t kFloatInfinity = 0x7f800000u;
inline constexpr int kFloatMantissaBits = 23;
inline constexpr int kFloatBias = 127;

TESSERA_HOST_DEVICE constexpr std::uint32_t bits_of(float x) { return __builtin_bit_cast(std::uint32_t, x); }
TESSERA_HOST_DEVICE constexpr float float_of(std::uint32_t bits) { return __builtin_bit_cast(float, bits); }

// The 8-bit element formats. Each cast below follows from these constants.
struct E4M3 {
  static constexpr int kMantissaBits = 3, kBias = 7;
  static constexpr int kMaxExponent = 8;  // exponent of the largest number, 1.75 · 2^8
  static constexpr std::uint8_t kLargest = 0x7E, kNaN = 0x7F;
  static constexpr float kLargestValue = 448.0f;
  static constexpr std::uint32_t kReciprocal = 0x3B124925u;  // float32 nearest to 1/448
};
struct E5M2 {
  static constexpr int kMantissaBits = 2, kBias = 15;
  static constexpr int kMaxExponent = 15;  // exponent of the largest number, 1.75 · 2^15
  static constexpr std::uint8_t kLargest = 0x7B, kNaN = 0x7F;
  static constexpr float kLargestValue = 57344.0f;
  static constexpr std::uint32_t kReciprocal = 0x37924925u;  // float32 nearest to 1/57344
};

/// Returns the byte of the element nearest to x.
template <typename Element>
TESSERA_HOST_DEVICE constexpr std::uint8_t cast_to(float x) {
  constexpr int kDropped = kFloatMantissaBits - Element::kMantissaBits;
  constexpr std::uint32_t kSmallestNormal = static_cast<std::uint32_t>(kFloatBias + 1 - Element::kBias)
                                            << kFloatMantissaBits;
  // The last place of this number is that of the subnormal elements, so adding it to x rounds x to that place.
  constexpr std::uint32_t kRounder = static_cast<std::uint32_t>(kFloatBias + 1 - Element::kBias + kDropped)
                                     << kFloatMantissaBits;
  const std::uint32_t magnitude = bits_of(x) & kFloatMagnitude;
  const std::uint32_t sign = bits_of(x) >> 24 & 0x80u;
  if (magnitude > kFloatInfinity) return Element::kNaN;
  std::uint32_t code = 0;
  if (magnitude < kSmallestNormal) {
    code = bits_of(float_of(magnitude) + float_of(kRounder)) - kRounder;
  } else {
    const std::uint32_t half_and_even = (1u << (kDropped - 1)) - 1 + (magnitude >> kDropped & 1u);
    code = ((magnitude + half_and_even) >> kDropped) -
           (static_cast<std::uint32_t>(kFloatBias - Element::kBias) << Element::kMantissaBits);
    if (code > Element::kLargest) code = Element::kLargest;
  }
  return static_cast<std::uint8_t>(sign | code);
}

/// Returns the exact value of an element's byte.
template <typename Element>
TESSERA_HOST_DEVICE constexpr float value_of(std::uint8_t byte) {
  constexpr int kSmallestExponent = 1 - Element::kBias - Element::kMantissaBits;  // exponent of the smallest subnormal
  const std::uint32_t sign = (byte & 0x80u) << 24;
  const std::uint32_t exponent = (byte & 0x7fu) >> Element::kMantissaBits;
  const std::uint32_t mantissa = byte & ((1u << Element::kMantissaBits) - 1);
  if constexpr (Element::kLargest + 1 == Element::kNaN) {
    if ((byte & 0x7fu) == Element::kNaN) return float_of(sign | 0x7fc00000u);
  } else {
    if ((byte & 0x7fu) > Element::kLargest) {
      return float_of(sign | kFloatInfinity | (mantissa != 0 ? 0x00400000u : 0u));
    }
  }
  if (exponent == 0) {
    const float unit = float_of(static_cast<std::uint32_t>(kFloatBias + kSmallestExponent) << kFloatMantissaBits);
    const float value = static_cast<float>(mantissa) * unit;
    return float_of(sign | bits_of(value));
  }
  return float_of(sign | (exponent + static_cast<std::uint32_t>(kFloatBias - Element::kBias)) << kFloatMantissaBits |
                  mantissa << (kFloatMantissaBits - Element::kMantissaBits));
}

/// The NaN of E8M0. It is the scale of a block that holds NaN or infinity.
inline constexpr std::uint8_t kScaleNaN = 0xFF;

/// Returns the exact value 2^(s - 127), or NaN for 0xFF. 2^-127 is a subnormal float32.
TESSERA_HOST_DEVICE constexpr float value_of_scale(std::uint8_t s) {
  if (s == kScaleNaN) return float_of(0x7fc00000u);
  return s == 0 ? float_of(0x00400000u) : float_of(static_cast<std::uint32_t>(s) << kFloatMantissaBits);
}

/// Returns the exact value 2^(127 - s), by which a block's numbers are multiplied before the cast. Expects s <= 254.
TESSERA_HOST_DEVICE constexpr float inverse_of_scale(std::uint8_t s) {
  return s == 254 ? float_of(0x00400000u) : float_of(static_cast<std::uint32_t>(254 - s) << kFloatMantissaBits);
}

}  // namespace tessera::mx
