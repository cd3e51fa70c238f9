// 64-bit words in messages of doubles: each word is sent as two halves, which doubles hold exactly.
#pragma once

#include <cstdint>
#include <vector>

namespace tessera {

inline void append_halves(std::uint64_t value, std::vector<double>& numbers) {
  numbers.push_back(static_cast<double>(value >> 32));
  numbers.push_back(static_cast<double>(value & 0xffffffffu));
}

/// Returns the word of two adjacent numbers that append_halves wrote.
inline std::uint64_t join_halves(const double* halves) {
  return static_cast<std::uint64_t>(halves[0]) << 32 | static_cast<std::uint64_t>(halves[1]);
}

}  // namespace tessera
