#include "data/tokenizers/pre_tokenizer.h"

#include <chrono>

#include "data/tokenizers/tokenizer_json.h"
#include "tests/data/support.h"

namespace tessera::data {
namespace {

using Words = std::vector<std::string>;

Words pieces_of(const PreTokenizerSpec& spec, const std::string& text) {
  RegexScratch scratch;
  Words words;
  PreTokenizer(spec).split(text, scratch, [&](std::string_view word) { words.emplace_back(word); });
  return words;
}

SplitSpec spec_of(const std::string& pattern, SplitBehavior behavior = SplitBehavior::kIsolated, bool invert = false,
                  bool is_regex = true) {
  return {.place = "test", .pattern = pattern, .is_regex = is_regex, .behavior = behavior, .invert = invert};
}

Words split_by(const std::string& pattern, SplitBehavior behavior, const std::string& text, bool invert = false) {
  return pieces_of({.splits = {spec_of(pattern, behavior, invert)}}, text);
}

// The example in the documentation of the `tokenizers` library, and its edges.
TEST(PreTokenizer, Behaviors) {
  using enum SplitBehavior;
  const std::string text = "the-final--countdown";
  EXPECT_EQ(split_by("-", kRemoved, text), (Words{"the", "final", "countdown"}));
  EXPECT_EQ(split_by("-", kIsolated, text), (Words{"the", "-", "final", "-", "-", "countdown"}));
  EXPECT_EQ(split_by("-", kMergedWithPrevious, text), (Words{"the-", "final-", "-", "countdown"}));
  EXPECT_EQ(split_by("-", kMergedWithNext, text), (Words{"the", "-final", "-", "-countdown"}));
  EXPECT_EQ(split_by("-", kContiguous, text), (Words{"the", "-", "final", "--", "countdown"}));

  EXPECT_EQ(split_by("-", kMergedWithPrevious, "--a-"), (Words{"-", "-", "a-"}));
  EXPECT_EQ(split_by("-", kMergedWithNext, "-a--"), (Words{"-a", "-", "-"}));
  EXPECT_EQ(split_by("-", kContiguous, "--a--"), (Words{"--", "a", "--"}));
  EXPECT_EQ(split_by("-", kRemoved, "--"), Words{});
  for (const SplitBehavior behavior : {kRemoved, kIsolated, kMergedWithPrevious, kMergedWithNext, kContiguous}) {
    EXPECT_EQ(split_by("-", behavior, "none"), Words{"none"});
    EXPECT_EQ(split_by("-", behavior, ""), Words{});
  }
}

TEST(PreTokenizer, InvertExchangesMatchesAndGaps) {
  using enum SplitBehavior;
  EXPECT_EQ(split_by("[a-z]+", kRemoved, "ab-cd", true), (Words{"ab", "cd"}));
  EXPECT_EQ(split_by("[a-z]+", kMergedWithPrevious, "ab-cd-", true), (Words{"ab-", "cd-"}));
  EXPECT_EQ(split_by("[a-z]+", kMergedWithNext, "ab-cd", true), (Words{"ab", "-cd"}));
}

TEST(PreTokenizer, AStringIsNoPattern) {
  using enum SplitBehavior;
  EXPECT_EQ(pieces_of({.splits = {spec_of(".*", kIsolated, false, false)}}, "a.*b"), (Words{"a", ".*", "b"}));
  EXPECT_EQ(pieces_of({.splits = {spec_of("\u00e9", kRemoved, false, false)}}, "1\u00e92\u00e8"),
            (Words{"1", "2\u00e8"}));
}

TEST(PreTokenizer, EmptyMatchesCut) {
  using enum SplitBehavior;
  EXPECT_EQ(split_by("", kIsolated, "ab"), (Words{"a", "b"}));
  EXPECT_EQ(split_by("x*", kIsolated, "\u00e9xxb"), (Words{"\u00e9", "xx", "b"}));
  EXPECT_EQ(split_by("(?=[A-Z])", kIsolated, "camelCaseText"), (Words{"camel", "Case", "Text"}));
}

// A split sees each part that the previous split has left alone. It cannot look beyond the part's ends.
TEST(PreTokenizer, SplitsAreInSequence) {
  EXPECT_EQ(pieces_of({.splits = {spec_of("\\p{N}{1,3}"), spec_of("a+")}}, "baa1234aab"),
            (Words{"b", "aa", "123", "4", "aa", "b"}));
  EXPECT_EQ(pieces_of({.splits = {spec_of("1"), spec_of("\\s+(?!\\S)|\\s+")}}, "a  1  b"),
            (Words{"a", "  ", "1", " ", " ", "b"}));
}

TEST(PreTokenizer, ByteLevel) {
  const PreTokenizerSpec spec{.splits = {}, .byte_level_regex = true};
  EXPECT_EQ(pieces_of(spec, "Hello world's  12 end\n"), (Words{"Hello", " world", "'s", " ", " 12", " end", "\n"}));
  const PreTokenizerSpec prefix{.splits = {spec_of("-")}, .add_prefix_space = true, .byte_level_regex = true};
  EXPECT_EQ(pieces_of(prefix, "a b- c"), (Words{" a", " b", " -", " c"}));  // each part gets a space
  EXPECT_EQ(pieces_of({.splits = {spec_of("-")}, .add_prefix_space = true}, "a-"), (Words{" a", " -"}));
  EXPECT_EQ(pieces_of(prefix, ""), Words{});
}

bool matches(const std::string& pattern, const std::string& text) {
  RegexScratch scratch;
  Regex::Match match;
  return Regex(pattern, "test").find(text, 0, scratch, match) && match.begin == 0 && match.end == text.size();
}

// These are the cases in which Oniguruma and PCRE2 differ.
TEST(Regex, MeansWhatOnigurumaMeans) {
  EXPECT_TRUE(matches("\\s", "\u00a0"));
  EXPECT_TRUE(matches("[\\s]", "\x0b"));
  EXPECT_FALSE(matches("\\s", "\u180e"));
  EXPECT_FALSE(matches("[^\\S]", "\u180e"));
  EXPECT_TRUE(matches("[\\S]", "\u180e"));
  EXPECT_TRUE(matches("\\w", "\u0301"));
  EXPECT_TRUE(matches("\\w", "\u00b2"));
  EXPECT_FALSE(matches("\\w", "\u2082"));
  EXPECT_FALSE(matches("[\\w]", "\u00b2"));  // unlike in a class
  EXPECT_TRUE(matches("[^\\w]", "\u00b2"));
  EXPECT_TRUE(matches("\\d", "\u0664"));
  EXPECT_FALSE(matches("\\v", "\n"));  // only a vertical tab matches
  EXPECT_TRUE(matches("\\v", "\x0b"));
  EXPECT_TRUE(matches("(?i:'s)", "'\u017f"));
  EXPECT_TRUE(matches("(?i:'s|x)y", "'Sy"));
  EXPECT_FALSE(matches("(?i:'s|x)y", "'sY"));
  EXPECT_TRUE(matches("\\p{Han}", "\u4e00"));
  EXPECT_FALSE(matches("\\p{Han}", "\u3001"));  // used with Han, but not of that script
  EXPECT_TRUE(matches("\\p{^L}", "1"));
  EXPECT_TRUE(matches("a{,2}", "aa"));
  EXPECT_FALSE(matches("a{,2}", "aaa"));
  EXPECT_TRUE(matches("a$\n^b$", "a\nb"));
  EXPECT_TRUE(matches("a$\n$", "a\n"));  // the second $ is on the empty line behind the line feed
  EXPECT_TRUE(matches("[a-z-]+", "a-z"));
  EXPECT_TRUE(matches("[%&'()*+,\\-./]+", "-/"));
  EXPECT_TRUE(matches("}\\x{41}\\u0042\\x43", "}ABC"));
  EXPECT_TRUE(matches("(a|b)+?c", "abc"));
  EXPECT_TRUE(matches("[\u4e00-\u9fa5]+", "\u4e2d\u6587"));
}

TEST(Regex, Errors) {
  const std::vector<std::pair<std::string, std::string>> bad{
      {"[a[bc]]", "a class within a class"},
      {"[a&&b]", "an intersection"},
      {"[]a]", "first of a class"},
      {"[a", "not closed"},
      {"(a", "not closed"},
      {"a)", "not opened"},
      {"\\", "backslash at the end"},
      {"\\h", "\\h"},
      {"\\b", "\\b"},
      {"\\1", "\\1"},
      {"\\p{L", "without braces"},
      {"\\pL", "without braces"},
      {"\\p{Nonsense}", "PCRE2 refuses the pattern \"\\p{Nonsense}\""},
      {"(?<name>a)", "this kind of group"},
      {"(?i)a", "this kind of group"},
      {"(*UTF)a", "this kind of group"},
      {"(?i:ss)", "ligature"},
      {"(?i:\u00e9)", "beyond ASCII"},
      {"(?i:[a-z])", "a class without regard to case"},
      {"a{1,3}+", "quantifier of an interval"},
      {"a{2}?", "quantifier of an interval"},
      {"a{", "brace"},
      {"a{x}", "brace by itself"},
      {"a+++", "quantifier of a quantifier"},
      {"[b-a]", "PCRE2 refuses"},
      {"*a", "PCRE2 refuses"},
      {"\\xE9", "this code"},
      {"\\x{110000}", "PCRE2 refuses"},
      {"(?:(?:(?:a{1000}){1000}){1000})", "PCRE2 refuses"},
      {std::string("a\0b", 3), "NUL"},
  };
  for (const auto& item : bad) {
    expect_error([&] { Regex(item.first, "'file', $.field"); }, {"'file', $.field", item.second});
  }
  expect_error([] { Regex(std::string(100'000, 'a'), "'file'"); }, {"'file'", "100000 bytes"});
  expect_error([] { Regex(std::string(60'000, '('), "'file'"); }, {"not closed"});
  expect_error([] { Regex(std::string(2000, '(') + "a" + std::string(2000, ')'), "'file'"); }, {"PCRE2 refuses"});
}

TEST(Regex, APatternThatTakesForeverIsAnError) {
  RegexScratch scratch;
  Regex::Match match;
  const std::string text(200, 'a');
  const auto start = std::chrono::steady_clock::now();
  expect_error([&] { Regex("(?:a+a+)+[bc]", "'file', $.field").find(text, 0, scratch, match); },
               {"'file', $.field", "200 bytes", "limit"});
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(60));
}

// Uses patterns of known models on texts for which careless matching takes quadratic time or deep stacks.
TEST(Regex, LongRunsAreNoProblem) {
  const PreTokenizerSpec spec{.splits = {spec_of("(?i:'s|'t)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}|"
                                                 " ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+")}};
  for (const char* unit : {"a", " ", "\n", " \n", "1", "!", "\u4e2d", "\u0301"}) {
    std::string text;
    while (text.size() < 1'000'000) text += unit;
    std::size_t size = 0;
    for (const std::string& word : pieces_of(spec, text + "x")) size += word.size();
    EXPECT_EQ(size, text.size() + 1) << unit;
  }
}

}  // namespace
}  // namespace tessera::data
