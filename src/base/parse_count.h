// Counts as people write them: 32k, 1.5M, 64Ki.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace tessera {

/// For messages: what parse_count takes.
inline constexpr const char* kCountForm =
    "a whole number, with a unit if you like: k, M, G or B, T (powers of 1000) or Ki, Mi, Gi, Ti (powers of 1024), as "
    "in 32k or 1.5M";

/// The number that `text` means; nullopt if it is none, is not whole or does not fit. K is the same as k.
std::optional<std::int64_t> parse_count(std::string_view text);

}  // namespace tessera
