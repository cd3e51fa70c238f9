// Texts and times in memory that other processes read at any time.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

namespace tessera {

/// The memory order of loads and stores whose readers need no other memory that was written before.
inline constexpr auto kRelaxed = std::memory_order_relaxed;

/// Returns CLOCK_MONOTONIC, which is the same clock in all processes of a machine.
inline std::int64_t monotonic_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

/// Holds a text in shared memory, which ends with a zero. A reader may see a mixture of two texts while one is written.
template <std::size_t kSize>
using SharedText = std::array<std::atomic<char>, kSize>;

/// Stores as many whole UTF-8 characters of `text` as fit.
template <std::size_t kSize>
void put_text(std::string_view text, SharedText<kSize>& to) {
  std::size_t length = std::min(text.size(), kSize - 1);
  const auto continues = [](char c) { return (static_cast<unsigned char>(c) & 0xc0u) == 0x80u; };
  while (length > 0 && length < text.size() && continues(text[length])) --length;
  for (std::size_t i = 0; i < length; ++i) to[i].store(text[i], kRelaxed);
  to[length].store('\0', kRelaxed);
}

/// Returns the text up to its zero.
template <std::size_t kSize>
std::string get_text(const SharedText<kSize>& from) {
  std::string text;
  for (const std::atomic<char>& character : from) {
    const char c = character.load(kRelaxed);
    if (c == '\0') break;
    text += c;
  }
  return text;
}

}  // namespace tessera
