// Block quantization: numbers that share a scale. What is here is the exact definition that every backend's kernels
// reproduce byte for byte.
//
// MXFP8 (OCP Microscaling Formats v1.0): 32 numbers share an E8M0 scale s; number i is element[i] · 2^(s-127).
// FP8 blockwise (DeepSeek-V3, arXiv 2412.19437, sec. 3.3.2): 128 numbers, or 128 × 128, share a float32 scale.
#pragma once

#include "mx/formats.h"

namespace tessera::mx {

/// How a block's scale follows from its largest magnitude. With v = amax and emax the element's largest exponent:
enum class ScalingMode : std::uint8_t {
  kFloor,  // 2^(floor(log2 v) - emax): the OCP specification's; clips the top of a binade
  kRceil,  // 2^ceil(log2(v / largest)): the smallest power of two that clips nothing (cuBLAS, Transformer Engine)
  kCeil,   // 2^(ceil(log2 v) - emax)
  kEven,   // floor of v rounded to the element's mantissa
};

/// The scale byte for a block whose largest magnitude is the finite number amax >= 0. 0 for amax = 0.
template <typename Element = E4M3>
TESSERA_HOST_DEVICE constexpr std::uint8_t scale_byte(float amax, ScalingMode mode) {
  std::uint32_t bits = bits_of(amax);
  if (mode == ScalingMode::kRceil) {
    const std::uint32_t v = bits_of(amax * float_of(Element::kReciprocal));
    const std::uint32_t exponent = v >> kFloatMantissaBits, mantissa = v & kFloatMantissa;
    // E8M0 has no subnormals: below 2^-126 there is only 2^-127, good for up to 2^-127 = mantissa 0x400000.
    return static_cast<std::uint8_t>(exponent == 0 ? (mantissa > 0x400000u ? 1 : 0)
                                                   : exponent + (mantissa != 0 ? 1u : 0u));
  }
  if (mode == ScalingMode::kEven) bits += 1u << (kFloatMantissaBits - Element::kMantissaBits - 1);
  std::uint32_t exponent = bits >> kFloatMantissaBits;
  if (mode == ScalingMode::kCeil && (bits & kFloatMantissa) != 0) ++exponent;
  return static_cast<std::uint8_t>(exponent < Element::kMaxExponent ? 0 : exponent - Element::kMaxExponent);
}

/// Below this a block's largest magnitude counts as this for a float32 scale, so that neither the scale nor its inverse
/// leaves the range of normal numbers.
inline constexpr float kSmallestAmax = 0x1p-100f;

/// The float32 scale for a block whose largest magnitude is amax: amax / 448.
TESSERA_HOST_DEVICE constexpr float float_scale(float amax) {
  return (amax < kSmallestAmax ? kSmallestAmax : amax) / E4M3::kLargestValue;
}
/// By what such a block's numbers are multiplied before the cast: 448 / amax.
TESSERA_HOST_DEVICE constexpr float inverse_float_scale(float amax) {
  return E4M3::kLargestValue / (amax < kSmallestAmax ? kSmallestAmax : amax);
}

/// Numbers that share an E8M0 scale in the specification, and in every MXFP8 tensor's layout. Where more numbers share
/// one, it is repeated.
inline constexpr int kBlock = 32;
/// Numbers along the contraction that share a scale in the formats for Hopper's tensor cores.
inline constexpr int kWideBlock = 128;

enum class ScaleType : std::uint8_t { kE8M0, kFloat32 };

/// What a quantized matrix is: which numbers share a scale, and how it is found. `along` numbers along the
/// contraction (the matrix's last dim) and `across` rows share one.
struct Format {
  ScaleType scale_type = ScaleType::kE8M0;
  ScalingMode mode = ScalingMode::kRceil;  // of an E8M0 scale
  std::int32_t along = kBlock;
  std::int32_t across = 1;

  /// Numbers along the contraction per stored scale: 32 for E8M0, where wider blocks repeat theirs.
  TESSERA_HOST_DEVICE constexpr std::int32_t scale_width() const {
    return scale_type == ScaleType::kE8M0 ? kBlock : along;
  }
  /// Rows per stored scale; E8M0 scales are stored for every row.
  TESSERA_HOST_DEVICE constexpr std::int32_t scale_height() const {
    return scale_type == ScaleType::kE8M0 ? 1 : across;
  }
  /// True if the transposed matrix has the transposed blocks: then one copy serves both orientations.
  TESSERA_HOST_DEVICE constexpr bool square() const { return along == across; }
  bool operator==(const Format&) const = default;
};

/// The largest magnitude of `count` numbers `stride` apart, infinity if one of them is not finite.
TESSERA_HOST_DEVICE constexpr float block_amax(const float* x, std::int64_t count, std::int64_t stride = 1) {
  std::uint32_t amax = 0;  // magnitudes compare as integers, NaN above infinity
  for (std::int64_t i = 0; i < count; ++i) {
    const std::uint32_t magnitude = bits_of(x[i * stride]) & kFloatMagnitude;
    if (magnitude > amax) amax = magnitude;
  }
  return float_of(amax < kFloatInfinity ? amax : kFloatInfinity);
}

/// One MXFP8 block: `count` (at most 32, or a wider block's) elements and their scale byte. With NaN or infinity in the
/// block the scale is 0xFF and all elements are NaN.
template <typename Element = E4M3>
TESSERA_HOST_DEVICE constexpr std::uint8_t quantize_block(const float* x, std::int64_t count, ScalingMode mode,
                                                          std::uint8_t* elements) {
  const float amax = block_amax(x, count);
  if (bits_of(amax) == kFloatInfinity) {
    for (std::int64_t i = 0; i < count; ++i) elements[i] = Element::kNaN;
    return kScaleNaN;
  }
  const std::uint8_t scale = scale_byte<Element>(amax, mode);
  for (std::int64_t i = 0; i < count; ++i) elements[i] = cast_to<Element>(x[i] * inverse_of_scale(scale));
  return scale;
}

}  // namespace tessera::mx
