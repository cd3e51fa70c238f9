// Reads counts as people write them: 32k, 1.5M, 64Ki, 1e12.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace tessera {

/// Describes in messages what parse_count accepts.
inline constexpr const char* kCountForm =
    "a whole number, with a unit if you like: k, M, G or B, T (powers of 1000), Ki, Mi, Gi, Ti (powers of 1024) or a "
    "power of ten, as in 32k, 1.5M or 2e9";

/// Returns the number that `text` means, or nullopt if it is no number, not whole or too large. K means the same as k.
std::optional<std::int64_t> parse_count(std::string_view text);

}  // namespace tessera
