// Block quantization: the numbers of a block share a scale. This file is the exact definition, which the kernels of
// every backend reproduce byte for byte.
//
// In MXFP8 (OCP Microscaling Formats v1.0), 32 numbers share an E8M0 scale s. Number i is element[i] · 2^(s-127).
// In FP8 blockwise (DeepSeek-V3, arXiv 2412.19437, sec. 3.3.2), 128 numbers, or 128 × 128, share a float32 scale.
#pragma once

#include "mx/formats.h"

namespace tessera::mx {

/// Defines how the scale follows from a block's largest magnitude v. emax is the largest exponent of the element type.
enum class ScalingMode : std::uint8_t {
  kFloor,  // 2^(floor(log2 v) - emax), as in the OCP specification; clips the top of a binade
  kRceil,  // 2^ceil(log2(v / largest)): the smallest power of two that clips nothing (cuBLAS, Transformer Engine)
  kCeil,   // 2^(ceil(log2 v) - emax)
  kEven,   // as kFloor, after v is rounded to the element's mantissa
};

/// Returns the scale byte for a block whose largest magnitude is `amax`, which is finite and >= 0. If amax is 0, the
/// byte is 0.
template <typename Element = E4M3>
TESSERA_HOST_DEVICE constexpr std::uint8_t scale_byte(float amax, ScalingMode mode) {
  std::uint32_t bits = bits_of(amax);
  if (mode == ScalingMode::kRceil) {
    const std::uint32_t v = bits_of(amax * float_of(Element::kReciprocal));
    const std::uint32_t exponent = v >> kFloatMantissaBits, mantissa = v & kFloatMantissa;
    // E8M0 has no subnormals. Below 2^-126 the only scale is 2^-127, which fits v up to 2^-127 (mantissa 0x400000).
    return static_cast<std::uint8_t>(exponent == 0 ? (mantissa > 0x400000u ? 1 : 0)
                                                   : exponent + (mantissa != 0 ? 1u : 0u));
  }
  if (mode == ScalingMode::kEven) bits += 1u << (kFloatMantissaBits - Element::kMantissaBits - 1);
  std::uint32_t exponent = bits >> kFloatMantissaBits;
  if (mode == ScalingMode::kCeil && (bits & kFloatMantissa) != 0) ++exponent;
  return static_cast<std::uint8_t>(exponent < Element::kMaxExponent ? 0 : exponent - Element::kMaxExponent);
}

/// The lower bound of a block's largest magnitude when a float32 scale is computed from it. It keeps the scale and its
/// inverse within the range of normal numbers.
inline constexpr float kSmallestAmax = 0x1p-100f;

/// Returns the float32 scale for a block whose largest magnitude is amax: amax / 448.
TESSERA_HOST_DEVICE constexpr float float_scale(float amax) {
  return (amax < kSmallestAmax ? kSmallestAmax : amax) / E4M3::kLargestValue;
}
/// Returns the factor by which the block's numbers are multiplied before the cast: 448 / amax.
TESSERA_HOST_DEVICE constexpr float inverse_float_scale(float amax) {
  return E4M3::kLargestValue / (amax < kSmallestAmax ? kSmallestAmax : amax);
}

/// The number of numbers that share an E8M0 scale in the specification and in the layout of every MXFP8 tensor. If a
/// format's blocks are wider, the layout repeats their scale.
inline constexpr int kBlock = 32;
/// The number of numbers along the contraction that share a scale in the formats for Hopper's tensor cores.
inline constexpr int kWideBlock = 128;
/// The same in the widest format, which halves how often sums leave the tensor cores. It has E8M0 scales only.
inline constexpr int kWidestBlock = 2 * kWideBlock;

enum class ScaleType : std::uint8_t { kE8M0, kFloat32 };

/// Defines which numbers of a matrix share a scale, and how that scale is found. A block is `along` numbers
/// along the contraction (the matrix's last dim) by `across` rows.
struct Format {
  ScaleType scale_type = ScaleType::kE8M0;
  ScalingMode mode = ScalingMode::kRceil;  // for E8M0 scales only
  std::int32_t along = kBlock;
  std::int32_t across = 1;

  /// Returns how many numbers along the contraction one stored scale covers. For E8M0 it is 32: wider blocks repeat
  /// their scale.
  TESSERA_HOST_DEVICE constexpr std::int32_t scale_width() const {
    return scale_type == ScaleType::kE8M0 ? kBlock : along;
  }
  /// Returns how many rows one stored scale covers. E8M0 scales are stored for every row.
  TESSERA_HOST_DEVICE constexpr std::int32_t scale_height() const {
    return scale_type == ScaleType::kE8M0 ? 1 : across;
  }
  /// Returns whether the transposed matrix has the transposed blocks. Then one copy serves both orientations.
  TESSERA_HOST_DEVICE constexpr bool square() const { return along == across; }
  bool operator==(const Format&) const = default;
};

/// Returns the largest magnitude of `count` numbers that are `stride` apart, or infinity if one of them is not finite.
TESSERA_HOST_DEVICE constexpr float block_amax(const float* x, std::int64_t count, std::int64_t stride = 1) {
  std::uint32_t amax = 0;  // magnitudes compare as integers; NaN is above infinity
  for (std::int64_t i = 0; i < count; ++i) {
    const std::uint32_t magnitude = bits_of(x[i * stride]) & kFloatMagnitude;
    if (magnitude > amax) amax = magnitude;
  }
  return float_of(amax < kFloatInfinity ? amax : kFloatInfinity);
}

/// Quantizes one MXFP8 block of `count` numbers. These are at most 32, or as many as a wider block has. Writes the
/// elements and returns the scale byte. If the block holds NaN or infinity, the scale is 0xFF and all elements are NaN.
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
