#include "base/parse_count.h"

#include <charconv>
#include <limits>

#include "base/parse_number.h"

namespace tessera {
namespace {

/// Returns base^exponent, which must fit.
std::int64_t power_of(std::int64_t base, std::size_t exponent) {
  std::int64_t power = 1;
  for (std::size_t i = 0; i < exponent; ++i) power *= base;
  return power;
}

/// Returns the factor that a unit stands for, or 0 if there is no such unit. The exponent in 2e9 is one, too.
std::int64_t factor_of(std::string_view unit) {
  if (unit.empty()) return 1;
  if (unit[0] == 'e') {
    const auto exponent = parse_number<unsigned>(unit.substr(1));
    return exponent && *exponent <= std::numeric_limits<std::int64_t>::digits10 ? power_of(10, *exponent) : 0;
  }
  const bool is_binary = unit.size() == 2 && unit[1] == 'i';
  if ((unit.size() > 1 && !is_binary) || unit == "Bi") return 0;
  constexpr std::string_view kUnits = "kMGT";
  const char letter = unit[0] == 'K' ? 'k' : unit[0] == 'B' ? 'G' : unit[0];
  const std::size_t index = kUnits.find(letter);
  return index == std::string_view::npos ? 0 : power_of(is_binary ? 1024 : 1000, index + 1);
}

}  // namespace

std::optional<std::int64_t> parse_count(std::string_view text) {
  std::int64_t count = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), count);
  if (error != std::errc()) return std::nullopt;
  std::string_view rest(end, static_cast<std::size_t>(text.data() + text.size() - end));
  std::string_view fraction;
  if (rest.starts_with('.')) {
    rest.remove_prefix(1);
    fraction = rest.substr(0, rest.find_first_not_of("0123456789"));
    rest.remove_prefix(fraction.size());
    constexpr std::size_t kMaxDigits = 18;
    if (fraction.empty() || fraction.size() > kMaxDigits || rest.empty()) return std::nullopt;
  }
  const std::int64_t factor = factor_of(rest);
  if (factor == 0 || __builtin_mul_overflow(count, factor, &count)) return std::nullopt;
  std::int64_t numerator = 0, denominator = 1;
  for (const char digit : fraction) {
    numerator = 10 * numerator + (digit - '0');
    denominator *= 10;
  }
  const __int128 product = static_cast<__int128>(numerator) * factor;
  if (product % denominator != 0) return std::nullopt;
  const auto part = static_cast<std::int64_t>(product / denominator);  // less than `factor`
  const bool overflows =
      text.starts_with('-') ? __builtin_sub_overflow(count, part, &count) : __builtin_add_overflow(count, part, &count);
  return overflows ? std::nullopt : std::optional(count);
}

}  // namespace tessera
