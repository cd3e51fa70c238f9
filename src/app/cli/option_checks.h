// Checks the numbers that options are given.
#pragma once

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>

#include "base/parse_count.h"
#include "base/parse_number.h"

namespace tessera {

/// Returns a check that an option is a number from `lowest` to `highest`. CLI11's own Range accepts "nan".
inline CLI::Validator is_number(double lowest, double highest) {
  return CLI::Validator(
      [lowest, highest](const std::string& text) {
        const std::optional<double> number = parse_number<double>(text);
        return number >= lowest && number <= highest
                   ? std::string()
                   : fmt::format("{} is not a number from {} to {}", text, lowest, highest);
      },
      fmt::format("[{} - {}]", lowest, highest));
}

/// Returns a transform for an option that is a count from `lowest` to `highest`. The count may have a unit, as in 32k.
inline CLI::Validator as_count(std::int64_t lowest = 0, std::int64_t highest = std::numeric_limits<int>::max()) {
  return {[lowest, highest](std::string& text) {
            const auto count = parse_count(text);
            if (!count) return fmt::format("'{}' is not a count: expected {}", text, kCountForm);
            if (*count < lowest || *count > highest) {
              return fmt::format("{} is out of range: expected {} to {}", *count, lowest, highest);
            }
            text = std::to_string(*count);
            return std::string();
          },
          "COUNT", "count"};
}

}  // namespace tessera
