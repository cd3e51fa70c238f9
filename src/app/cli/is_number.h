// Checks the number of an option.
#pragma once

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <charconv>
#include <string>

namespace tessera {

/// Returns a check that an option is a number from `lowest` to `highest`. CLI11's own Range accepts "nan".
inline CLI::Validator is_number(double lowest, double highest) {
  return CLI::Validator(
      [lowest, highest](const std::string& text) {
        double number = 0.0;
        const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
        const bool in_range =
            error == std::errc() && end == text.data() + text.size() && number >= lowest && number <= highest;
        return in_range ? std::string() : fmt::format("{} is not a number from {} to {}", text, lowest, highest);
      },
      fmt::format("[{} - {}]", lowest, highest));
}

}  // namespace tessera
