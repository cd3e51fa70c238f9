// bfloat16: the upper 16 bits of an IEEE-754 float32 (8 exponent bits, 7 mantissa bits). Conversion from float32 rounds
// to nearest even. NaN stays a (quiet) NaN.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace tessera {

struct BFloat16 {
  std::uint16_t bits;

  BFloat16() = default;
  explicit BFloat16(float value) : bits(round_from(value)) {}
  explicit operator float() const { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }

 private:
  static std::uint16_t round_from(float value) {
    const auto word = std::bit_cast<std::uint32_t>(value);
    if ((word & 0x7fffffffu) > 0x7f800000u) {
      return static_cast<std::uint16_t>((word >> 16) | 0x40u);
    }
    return static_cast<std::uint16_t>((word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
  }
};
static_assert(sizeof(BFloat16) == 2);

}  // namespace tessera
