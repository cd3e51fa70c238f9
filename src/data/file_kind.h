// Recognizes from a file's first bytes whether it holds text that can be read, or something else.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace tessera::data {

/// Describes a kind of content that cannot be read as text.
struct ForeignKind {
  std::string name;    // for people: "a PNG image"
  std::string remedy;  // advice for people; empty if there is none
};

/// The number of a file's first bytes that find_foreign_kind needs.
inline constexpr std::size_t kKindBytes = 1u << 16;

/// Recognizes a file's kind from its first kKindBytes, or from all of a shorter file. gzip must be decompressed
/// already. Returns nullopt for text in UTF-8. Parts of the text may be ill-formed, but no more parts than there are
/// well-formed characters outside of ASCII.
std::optional<ForeignKind> find_foreign_kind(std::string_view beginning);

}  // namespace tessera::data
