// What a file holds, told by its first bytes: text that can be read, or something else.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace tessera::data {

/// Content that is not read as text.
struct ForeignKind {
  std::string name;    // for people: "a PNG image"
  std::string remedy;  // what to do about it; empty if there is nothing to say
};

/// How much of a file find_foreign_kind looks at.
inline constexpr std::size_t kKindBytes = 1u << 16;

/// Judges a file by its first kKindBytes, or all of a shorter one; gzip must be decompressed already. Returns nullopt
/// for text in UTF-8. Some of its parts may be ill-formed, but no more than there are characters outside of ASCII.
std::optional<ForeignKind> find_foreign_kind(std::string_view beginning);

}  // namespace tessera::data
