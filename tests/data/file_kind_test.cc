#include "data/file_kind.h"

#include <gtest/gtest.h>

#include <random>

#include "base/error.h"

namespace tessera::data {
namespace {

std::string kind_of(std::string_view beginning) {
  const auto kind = find_foreign_kind(beginning);
  return kind ? kind->name : "text";
}

std::string in_utf16(std::string_view ascii, bool big_endian) {
  std::string text;
  for (const char c : ascii) text += big_endian ? std::string{'\0', c} : std::string{c, '\0'};
  return text;
}

TEST(FileKind, TextIsText) {
  for (const std::string_view text :
       {"", "a", "plain\r\n\ttext\x1B[0m\f", "\xEF\xBB\xBFwith a byte order mark", "caf\u00E9 \u4E2D\u6587 \U0001F600",
        "BMW and MZ and ORC and RIFF and {\"a\": 1}", "PK is a name", "GGUF is a format", "The ftyp box",
        "GIF89a, GIF87a", "PAR1 begins a Parquet file", "\u00E9 one bad byte: \xE9"}) {
    EXPECT_EQ(kind_of(text), "text") << text;
  }
}

TEST(FileKind, WellKnownFormats) {
  using std::string_view_literals::operator""sv;
  const std::string tar = "a.txt" + std::string(252, '\0') + "ustar";
  for (const auto& [beginning, part] :
       std::vector<std::pair<std::string_view, std::string_view>>{{"PAR1\x15\0"sv, "Parquet"},
                                                                  {"\x28\xB5\x2F\xFD rest"sv, "zstd"},
                                                                  {"\xFD\x37zXZ\0\0"sv, "xz"},
                                                                  {"BZh91AY&SY"sv, "bzip2"},
                                                                  {"PK\x03\x04\x14"sv, "zip"},
                                                                  {"\x1F\x8B\x08"sv, "gzip twice"},
                                                                  {tar, "tar"},
                                                                  {"\x89PNG\r\n\x1A\n"sv, "PNG"},
                                                                  {"\xFF\xD8\xFF\xE0"sv, "JPEG"},
                                                                  {"%PDF-1.7\n"sv, "PDF"},
                                                                  {"\x7F"
                                                                   "ELF\x02"sv,
                                                                   "ELF"},
                                                                  {"SQLite format 3\0"sv, "SQLite"},
                                                                  {"TSRATOK\n"sv, "prepared already"}}) {
    EXPECT_NE(kind_of(beginning).find(part), std::string::npos) << part << ": " << kind_of(beginning);
    EXPECT_NE(find_foreign_kind(beginning)->remedy, "") << part;
  }
}

TEST(FileKind, OtherEncodings) {
  for (const bool big_endian : {false, true}) {
    const std::string text = in_utf16("some words, and more of them", big_endian);
    EXPECT_EQ(kind_of((big_endian ? "\xFE\xFF" : "\xFF\xFE") + text), "text in UTF-16");
    EXPECT_EQ(kind_of(text), "text in UTF-16 without a byte order mark");
    EXPECT_NE(find_foreign_kind(text)->remedy.find(big_endian ? "UTF-16BE" : "UTF-16LE"), std::string::npos);
  }
  EXPECT_EQ(kind_of(std::string("\xFF\xFE\0\0a\0\0\0", 8)), "text in UTF-32");
  for (const char* latin1 : {"caf\xE9", "caf\xE9 au lait",
                             "na\xEFve \xFC"
                             "ber"}) {
    EXPECT_NE(kind_of(latin1).find("not UTF-8"), std::string::npos) << latin1;
    EXPECT_NE(find_foreign_kind(latin1)->remedy.find("iconv"), std::string::npos);
  }
}

TEST(FileKind, BinaryData) {
  std::mt19937 random(1);
  std::string bytes(5000, ' ');
  for (char& c : bytes) c = static_cast<char>(1 + random() % 255);
  EXPECT_EQ(kind_of(bytes), "binary data");
  EXPECT_EQ(kind_of(std::string("text, but\0", 10)), "binary data");
}

// The first bytes of a long file may end within a character.
TEST(FileKind, ACharacterThatIsCutIsNoFault) {
  std::string text(kKindBytes - 1, 'x');
  EXPECT_EQ(kind_of(text + "\xC3"), "text");
  EXPECT_NE(kind_of(text.substr(1) + "\xC3"), "text");  // this is shorter, so it is the whole file
}

}  // namespace
}  // namespace tessera::data
