// A seeded permutation of [0, size) that is computed, not stored. It is a Feistel network (Luby and Rackoff, 1988) over
// the smallest power of four that is at least `size`. The network is walked until it lands in [0, size) (Black and
// Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002). It takes at most 4 walks on average and no memory,
// and any element can be computed alone.
#pragma once

#include <bit>
#include <cstdint>

#include "tensor/philox.h"

namespace tessera::data {

class Permutation {
 public:
  /// Each `index`, such as an epoch, gives another permutation for the same seed and stream. It is below 2^32.
  Permutation(std::uint64_t size, std::uint64_t seed, std::uint32_t stream, std::uint32_t index)
      : size_(size), random_(seed, stream), index_(index) {
    const int bits = static_cast<int>(std::bit_width(size > 1 ? size - 1 : 1));
    half_bits_ = (bits + 1) / 2;
  }

  /// Maps `position` in [0, size) to its image in [0, size), one to one.
  std::uint64_t operator()(std::uint64_t position) const {
    do {
      position = encipher(position);
    } while (position >= size_);
    return position;
  }

 private:
  // With four rounds of random functions a Feistel network is indistinguishable from a random permutation. There are
  // more rounds here, because domains are small.
  static constexpr std::uint32_t kNumRounds = 8;

  std::uint64_t encipher(std::uint64_t value) const {
    const std::uint64_t mask = (std::uint64_t{1} << half_bits_) - 1;
    std::uint64_t left = value >> half_bits_;
    std::uint64_t right = value & mask;
    for (std::uint32_t round = 0; round < kNumRounds; ++round) {
      const std::uint32_t random = random_.words(static_cast<std::uint64_t>(index_) << 32 | right, round)[0];
      const std::uint64_t next = left ^ (random & mask);
      left = right;
      right = next;
    }
    return left << half_bits_ | right;
  }

  std::uint64_t size_;
  Philox random_;
  std::uint32_t index_;
  int half_bits_;
};

}  // namespace tessera::data
