// Hashes the small keys of hash tables.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>

namespace tessera {

/// Returns a hash of the values.
inline std::size_t hash_of(std::initializer_list<std::int64_t> values) {
  constexpr std::size_t kGolden = 0x9E3779B97F4A7C15ULL;  // 2^64 divided by the golden ratio; odd
  std::size_t hash = 0;
  for (const std::int64_t value : values) {
    hash = (hash ^ static_cast<std::size_t>(value)) * kGolden;
    hash ^= hash >> 29;
  }
  return hash;
}

}  // namespace tessera
