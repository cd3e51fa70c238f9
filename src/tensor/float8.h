// E4M3 (OCP 8-bit floating point 1.0): sign, 4 bits of exponent (bias 7), 3 of mantissa; largest 448, no infinity, NaN
// is 0x7F and 0xFF.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>

namespace tessera {

/// The value of an E4M3 byte; exact.
constexpr float e4m3_to_float(std::uint8_t bits) {
  const int exponent = bits >> 3 & 0xf, mantissa = bits & 0x7;
  const float sign = bits & 0x80 ? -1.0f : 1.0f;
  if (exponent == 0xf && mantissa == 0x7) return std::numeric_limits<float>::quiet_NaN();
  if (exponent == 0) return sign * static_cast<float>(mantissa) * 0x1p-9f;
  const auto scale = std::bit_cast<float>(static_cast<std::uint32_t>(exponent - 7 + 127) << 23);
  return sign * scale * (1.0f + static_cast<float>(mantissa) * 0.125f);
}

}  // namespace tessera
