// Repairs UTF-8 text, cuts it into pieces, and shows it in messages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace tessera {

/// Replaces every ill-formed part of `text` with U+FFFD and returns how many there were. An ill-formed part is a
/// maximal subpart as in the Unicode Standard 15.0, section 3.9 (the web does the same). Well-formed text, which is
/// nearly all text, is left untouched and read only once.
std::uint64_t repair_utf8(std::string& text);

/// Returns whether a byte of UTF-8 is in a character but not its first byte.
constexpr bool is_continuation(char byte) { return (static_cast<std::uint8_t>(byte) & 0xC0) == 0x80; }

/// Returns whether `text` has no ill-formed part.
bool is_utf8(std::string_view text);

/// Returns `text` without the byte order mark (U+FEFF) that some programs put before UTF-8.
std::string_view without_byte_order_mark(std::string_view text);

/// Returns the length of the first character of `text` if it is white space (the Unicode property White_Space), else 0.
std::size_t space_size(std::string_view text);

/// Returns whether `text` is empty or only white space.
bool is_blank(std::string_view text);

/// Returns `text` for a message: in quotes, with control characters as \x00, and cut off (with its size) if it is long.
std::string quote_text(std::string_view text);

/// Returns a short text of a file, such as a name, for a message: bytes that are not printable ASCII as \xNN, and at
/// most 200 of them, with "..." after them if there are more.
std::string printable(std::string_view text);

/// Returns the length in bytes of the first piece if `text` is cut into pieces of about `max_bytes` (at least 8). A
/// text that is not longer is one piece. A cut is before the last run of spaces (U+0020) that begins in the second half
/// of the limit, so that words stay whole. Without such a run, the cut is at the last character boundary. `text` must
/// be UTF-8.
std::size_t first_piece_size(std::string_view text, std::size_t max_bytes);

/// Returns how many bytes of `text` are whole characters: all except an incomplete character at its end. Bytes that are
/// not UTF-8 count as whole.
std::size_t whole_characters(std::string_view text);

}  // namespace tessera
