// Counter-based random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
//
// A number is a pure function of (seed, stream, index), which say what it is for, not when it was drawn. So results do
// not depend on threads, on sharding or on earlier draws, and a resumed run needs no saved state.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <string_view>

#include "base/host_device.h"

namespace tessera {

/// Returns the four 32-bit words that Philox4x32-10 gives for a counter and a key.
TESSERA_HOST_DEVICE inline std::array<std::uint32_t, 4> philox4x32(std::array<std::uint32_t, 4> counter,
                                                                   std::array<std::uint32_t, 2> key) {
  constexpr std::uint64_t kMultiplier0 = 0xD2511F53u;
  constexpr std::uint64_t kMultiplier1 = 0xCD9E8D57u;
  constexpr std::uint32_t kWeyl0 = 0x9E3779B9u;
  constexpr std::uint32_t kWeyl1 = 0xBB67AE85u;
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t product0 = kMultiplier0 * counter[0];
    const std::uint64_t product1 = kMultiplier1 * counter[2];
    counter = {static_cast<std::uint32_t>(product1 >> 32) ^ counter[1] ^ key[0], static_cast<std::uint32_t>(product1),
               static_cast<std::uint32_t>(product0 >> 32) ^ counter[3] ^ key[1], static_cast<std::uint32_t>(product0)};
    key[0] += kWeyl0;
    key[1] += kWeyl1;
  }
  return counter;
}

/// Returns the FNV-1a hash of a name: the `stream` for the numbers that belong to that name.
constexpr std::uint32_t stream_of(std::string_view name) {
  std::uint32_t hash = 2166136261u;
  for (const char c : name) hash = (hash ^ static_cast<std::uint8_t>(c)) * 16777619u;
  return hash;
}

/// Draws random numbers of one stream of one seed.
class Philox {
 public:
  Philox(std::uint64_t seed, std::uint32_t stream) : seed_(seed), stream_(stream) {}

  /// Returns four independent words for `index`. `attempt` distinguishes redraws for the same index.
  TESSERA_HOST_DEVICE std::array<std::uint32_t, 4> words(std::uint64_t index, std::uint32_t attempt = 0) const {
    return philox4x32({static_cast<std::uint32_t>(index), static_cast<std::uint32_t>(index >> 32), attempt, stream_},
                      {static_cast<std::uint32_t>(seed_), static_cast<std::uint32_t>(seed_ >> 32)});
  }

  /// Returns a number that is uniform in (0, 1).
  TESSERA_HOST_DEVICE double uniform(std::uint64_t index, std::uint32_t attempt = 0) const {
    return to_unit(words(index, attempt)[0]);
  }

  /// Returns a standard normal number (Box-Muller in float64).
  TESSERA_HOST_DEVICE double normal(std::uint64_t index, std::uint32_t attempt = 0) const {
    const auto w = words(index, attempt);
    return std::sqrt(-2.0 * std::log(to_unit(w[0]))) * std::cos(2.0 * std::numbers::pi * to_unit(w[1]));
  }

  /// Returns a normal number of deviation 1 conditioned on |x| <= bound, by redrawing. bound >= 0.5 keeps the expected
  /// draws few.
  TESSERA_HOST_DEVICE double truncated_normal(std::uint64_t index, double bound) const {
    for (std::uint32_t attempt = 0;; ++attempt) {
      const double value = normal(index, attempt);
      if (std::abs(value) <= bound) return value;
    }
  }

 private:
  TESSERA_HOST_DEVICE static double to_unit(std::uint32_t word) { return (word + 0.5) * 0x1p-32; }

  std::uint64_t seed_;
  std::uint32_t stream_;
};

}  // namespace tessera
