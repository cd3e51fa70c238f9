#include "base/text.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"

namespace tessera {
namespace {

struct Sequence {
  std::size_t size;
  bool well_formed;
};

/// Returns the well-formed character, or the maximal ill-formed subpart, at `at`. By table 3-7 of the Unicode Standard,
/// the first byte decides which second bytes are allowed. That excludes overlong forms, surrogates and code points
/// above U+10FFFF.
Sequence sequence_at(std::string_view text, std::size_t at) {
  const auto byte_at = [&](std::size_t i) { return static_cast<std::uint8_t>(text[i]); };
  const std::uint8_t lead = byte_at(at);
  if (lead < 0x80) return {1, true};
  std::size_t size = 0;
  std::uint8_t low = 0x80;
  std::uint8_t high = 0xBF;
  if (lead >= 0xC2 && lead <= 0xDF) {
    size = 2;
  } else if (lead >= 0xE0 && lead <= 0xEF) {
    size = 3;
    if (lead == 0xE0) low = 0xA0;
    if (lead == 0xED) high = 0x9F;
  } else if (lead >= 0xF0 && lead <= 0xF4) {
    size = 4;
    if (lead == 0xF0) low = 0x90;
    if (lead == 0xF4) high = 0x8F;
  } else {
    return {1, false};
  }
  for (std::size_t i = 1; i < size; ++i) {
    if (at + i >= text.size() || byte_at(at + i) < low || byte_at(at + i) > high) return {i, false};
    low = 0x80;
    high = 0xBF;
  }
  return {size, true};
}

/// Returns the position of the first ill-formed part at or after `at`, which must be a boundary. Returns text.size() if
/// there is none.
std::size_t find_ill_formed(std::string_view text, std::size_t at) {
  constexpr std::uint64_t kHighBits = 0x8080808080808080u;
  while (at < text.size()) {
    if (at + sizeof(std::uint64_t) <= text.size()) {
      std::uint64_t word;
      std::memcpy(&word, text.data() + at, sizeof word);
      if ((word & kHighBits) == 0) {
        at += sizeof word;
        continue;
      }
    }
    const Sequence sequence = sequence_at(text, at);
    if (!sequence.well_formed) return at;
    at += sequence.size;
  }
  return text.size();
}

}  // namespace

std::uint64_t repair_utf8(std::string& text) {
  std::size_t bad = find_ill_formed(text, 0);
  if (bad == text.size()) return 0;
  constexpr std::string_view kReplacement = "\xEF\xBF\xBD";
  std::string repaired;
  repaired.reserve(text.size() + 16);
  std::uint64_t num_replaced = 0;
  std::size_t copied = 0;
  while (bad < text.size()) {
    repaired.append(text, copied, bad - copied);
    repaired.append(kReplacement);
    ++num_replaced;
    copied = bad + sequence_at(text, bad).size;
    bad = find_ill_formed(text, copied);
  }
  repaired.append(text, copied, std::string::npos);
  text = std::move(repaired);
  return num_replaced;
}

bool is_utf8(std::string_view text) { return find_ill_formed(text, 0) == text.size(); }

std::string_view without_byte_order_mark(std::string_view text) {
  constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";
  return text.starts_with(kByteOrderMark) ? text.substr(kByteOrderMark.size()) : text;
}

std::size_t space_size(std::string_view text) {
  if (text.empty()) return 0;
  const auto first = static_cast<std::uint8_t>(text[0]);
  if (first == ' ' || (first >= 9 && first <= 13)) return 1;
  if (text.starts_with("\xC2\x85") || text.starts_with("\xC2\xA0")) return 2;  // U+0085, U+00A0
  if (text.size() < 3) return 0;
  const bool in_general_punctuation = text.starts_with("\xE2\x80");  // U+2000 to U+203F
  const auto last = static_cast<std::uint8_t>(text[2]);
  if (in_general_punctuation && (last <= 0x8A || last == 0xA8 || last == 0xA9 || last == 0xAF)) return 3;
  for (const std::string_view space : {"\xE1\x9A\x80", "\xE2\x81\x9F", "\xE3\x80\x80"}) {  // U+1680, U+205F, U+3000
    if (text.starts_with(space)) return 3;
  }
  return 0;
}

bool is_blank(std::string_view text) {
  while (const std::size_t size = space_size(text)) text.remove_prefix(size);
  return text.empty();
}

std::string quote_text(std::string_view text) {
  constexpr std::size_t kMaxBytes = 100;
  std::size_t size = std::min(text.size(), kMaxBytes);
  while (size < text.size() && size > 0 && is_continuation(text[size])) --size;
  std::string quoted = "\"";
  bool is_control = false;
  for (std::size_t i = 0; i < size; ++i) {
    const auto byte = static_cast<std::uint8_t>(text[i]);
    const auto next = static_cast<std::uint8_t>(i + 1 < size ? text[i + 1] : '\0');
    const bool ends_control = std::exchange(is_control, byte == 0xC2 && next >= 0x80 && next < 0xA0);  // U+0080 to 9F
    if (byte < 0x20 || byte == 0x7F || is_control || ends_control) {
      quoted += fmt::format("\\x{:02x}", byte);
    } else {
      quoted += text[i];
    }
  }
  return size == text.size() ? quoted + '"' : fmt::format("{}...\" ({} bytes)", quoted, text.size());
}

std::string printable(std::string_view text) {
  constexpr std::size_t kMaxShown = 200;
  std::string shown;
  for (const char c : text.substr(0, kMaxShown)) {
    const auto byte = static_cast<std::uint8_t>(c);
    shown += byte >= 0x20 && byte < 0x7F ? std::string(1, c) : fmt::format("\\x{:02x}", byte);
  }
  return text.size() > kMaxShown ? shown + "..." : shown;
}

std::size_t first_piece_size(std::string_view text, std::size_t max_bytes) {
  TESSERA_CHECK(max_bytes >= 8, "max_bytes {}", max_bytes);
  if (text.size() <= max_bytes) return text.size();
  for (std::size_t cut = max_bytes; cut > max_bytes / 2; --cut) {
    if (text[cut] == ' ' && text[cut - 1] != ' ') return cut;
  }
  std::size_t cut = max_bytes;
  while (cut > max_bytes - 4 && is_continuation(text[cut])) --cut;
  return cut;
}

std::size_t whole_characters(std::string_view text) {
  constexpr std::size_t kLongest = 4;
  for (std::size_t back = 1; back <= std::min(kLongest, text.size()); ++back) {
    const auto byte = static_cast<unsigned char>(text[text.size() - back]);
    if (is_continuation(text[text.size() - back])) continue;
    const std::size_t length = byte >= 0xf0 ? 4 : byte >= 0xe0 ? 3 : byte >= 0xc0 ? 2 : 1;
    return length > back ? text.size() - back : text.size();
  }
  return text.size();
}

}  // namespace tessera
