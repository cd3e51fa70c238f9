// UTF-8 text: repair, and cutting into pieces.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace tessera::data {

/// Puts U+FFFD in the place of every ill-formed part of `text` and returns how many there were. An ill-formed
/// part is a maximal subpart in the sense of the Unicode Standard 15.0, section 3.9 (the practice of the web
/// as well). Well-formed text, which is nearly all of it, is left untouched and only read once.
std::uint64_t repair_utf8(std::string& text);

/// True for a byte of a character of UTF-8 that is not its first.
constexpr bool is_continuation(char byte) { return (static_cast<std::uint8_t>(byte) & 0xC0) == 0x80; }

/// True if `text` has no ill-formed part.
bool is_utf8(std::string_view text);

/// Length of the character that `text` begins with if it is white space (the Unicode property White_Space), else 0.
std::size_t space_size(std::string_view text);

/// True if `text` has nothing but white space, or nothing at all.
bool is_blank(std::string_view text);

/// `text` for a message: in quotes, control characters as \x00, cut off (and its size said) if it is long.
std::string quote_text(std::string_view text);

/// Length in bytes of the first piece of `text` when it is cut into pieces of about `max_bytes` (at least 8).
/// A text that is no longer is one piece. A cut falls before the last run of spaces (U+0020) that begins in
/// the second half of the limit, so that words stay whole; without such a run, at the last character boundary.
/// `text` must be UTF-8.
std::size_t first_piece_size(std::string_view text, std::size_t max_bytes);

/// Bytes of `text` that are whole characters: all but the beginning of one at its end. What is not UTF-8 counts as
/// whole.
std::size_t whole_characters(std::string_view text);

}  // namespace tessera::data
