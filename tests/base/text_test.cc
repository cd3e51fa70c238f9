#include "base/text.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

namespace tessera {
namespace {

std::string repaired(std::string text, std::uint64_t expected_count) {
  EXPECT_EQ(repair_utf8(text), expected_count);
  return text;
}

TEST(RepairUtf8, LeavesWellFormedTextAlone) {
  const std::string text =
      "plain, \u00e9\u07ff\u0800\ud7ff\ue000\uffff\U00010000\U0010ffff, and a NUL: " + std::string(1, '\0') +
      "; long enough for the fast path";
  EXPECT_EQ(repaired(text, 0), text);
  EXPECT_EQ(repaired("", 0), "");
}

// These examples are from the Unicode Standard 15.0, tables 3-8 to 3-11.
TEST(RepairUtf8, ReplacesMaximalSubparts) {
  const std::string r = "\uFFFD";
  EXPECT_EQ(repaired("\xC0\xAF\xE0\x80\xBF\xF0\x81\x82\x41", 8), r + r + r + r + r + r + r + r + "A");
  EXPECT_EQ(repaired("\xED\xA0\x80\xED\xBF\xBF\xED\xAF\x41", 8), r + r + r + r + r + r + r + r + "A");
  EXPECT_EQ(repaired("\xF4\x91\x92\x93\xFF\x41\x80\xBF\x42", 7), r + r + r + r + r + "A" + r + r + "B");
  EXPECT_EQ(repaired("\xE1\x80\xE2\xF0\x91\x92\xF1\xBF\x41", 4), r + r + r + r + "A");
}

TEST(RepairUtf8, ReplacesACharacterCutShortAtTheEnd) {
  EXPECT_EQ(repaired("0123456789 \xE2\x82", 1), "0123456789 \uFFFD");
}

TEST(FirstPieceSize, CutsBeforeSpacesAndNeverWithinACharacter) {
  EXPECT_EQ(first_piece_size("short", 16), 5u);
  EXPECT_EQ(first_piece_size("0123456789 abcdefghij", 16), 10u);
  EXPECT_EQ(first_piece_size("0123456789    abcdefghij", 16), 10u);  // the run of spaces stays together
  EXPECT_EQ(first_piece_size("0123456789abcdefghij", 16), 16u);
  std::string euros;
  for (int i = 0; i < 10; ++i) euros += "\u20ac";
  EXPECT_EQ(first_piece_size(euros, 16), 15u);
}

TEST(FirstPieceSize, PiecesJoinToTheText) {
  std::string text;
  for (int i = 0; i < 3000; ++i) text += i % 11 == 0 ? "  \n" : i % 7 == 0 ? "\U0001F600" : fmt::format("{}", i);
  std::string joined;
  for (std::string_view rest = text; !rest.empty();) {
    const std::size_t size = first_piece_size(rest, 64);
    ASSERT_GT(size, 0u);
    ASSERT_LE(size, 64u);
    std::string piece(rest.substr(0, size));
    ASSERT_EQ(repair_utf8(piece), 0u);
    joined += piece;
    rest.remove_prefix(size);
  }
  EXPECT_EQ(joined, text);
}

TEST(IsUtf8, SeesIllFormedParts) {
  for (const char* text : {"", "a", "\u00e9\u4e2d\U0001F600", "12345678\u00e9"}) EXPECT_TRUE(is_utf8(text)) << text;
  for (const char* text : {"\xFF", "12345678\xC3", "\xC0\x80", "\xED\xA0\x80"}) EXPECT_FALSE(is_utf8(text));
}

TEST(IsBlank, KnowsAllWhiteSpace) {
  for (const char* text : {"", " ", "\r\n\t\v\f", "\u0085\u00A0\u1680\u2000\u200A\u2028\u2029\u202F\u205F\u3000"}) {
    EXPECT_TRUE(is_blank(text)) << text;
  }
  for (const char* text : {"a", " a", "\u200B", "\xE2\x80", "\uFFFD"}) EXPECT_FALSE(is_blank(text)) << text;
}

TEST(QuoteText, IsShortAndPrintable) {
  EXPECT_EQ(quote_text("a \"b\" \u00e9"), "\"a \"b\" \u00e9\"");
  EXPECT_EQ(quote_text(std::string_view("\0\n", 2)), "\"\\x00\\x0a\"");
  EXPECT_EQ(quote_text("\u0080\u009B[31m\u009F\u00A0\u00C2"), "\"\\xc2\\x80\\xc2\\x9b[31m\\xc2\\x9f\u00A0\u00C2\"");
  EXPECT_EQ(quote_text(std::string(100, 'x')), '"' + std::string(100, 'x') + '"');
  EXPECT_EQ(quote_text(std::string(99, 'x') + "\u4e2d"), '"' + std::string(99, 'x') + "...\" (102 bytes)");
}

TEST(WithoutByteOrderMark, TakesOneFromTheBegin) {
  for (const char* text : {"", "a\uFEFF", "\xEF\xBB"}) EXPECT_EQ(without_byte_order_mark(text), text);
  EXPECT_EQ(without_byte_order_mark("\uFEFFa"), "a");
  EXPECT_EQ(without_byte_order_mark("\uFEFF\uFEFF"), "\uFEFF");
}

TEST(WholeCharacters, LeavesOutWhatHasOnlyBegun) {
  EXPECT_EQ(whole_characters(""), 0u);
  EXPECT_EQ(whole_characters("abc"), 3u);
  const std::string text = "a\u00E9\u4F60\U0001F600";  // characters of 1, 2, 3 and 4 bytes
  const std::vector<std::size_t> ends = {0, 1, 1, 3, 3, 3, 6, 6, 6, 6, 10};
  for (std::size_t size = 0; size <= text.size(); ++size) {
    EXPECT_EQ(whole_characters(std::string_view(text).substr(0, size)), ends[size]) << size;
  }
  EXPECT_EQ(whole_characters("a\x80\x80\x80\x80\x80"), 6u);  // no character begins here
  EXPECT_EQ(whole_characters("a\xFF"), 1u);
}

}  // namespace
}  // namespace tessera
