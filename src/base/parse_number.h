// Reads a text that is one number and nothing else.
#pragma once

#include <charconv>
#include <optional>
#include <string_view>
#include <system_error>

namespace tessera {

/// Returns the number that the whole text is, in the form of std::from_chars: decimal digits, without spaces and
/// without a plus sign. Returns nullopt for any other text, and for a number that T does not hold.
template <typename T>
std::optional<T> parse_number(std::string_view text) {
  T number{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size() ? std::optional<T>(number) : std::nullopt;
}

}  // namespace tessera
