#include "data/tokenizers/regex.h"

#include <algorithm>
#include <array>
#include <utility>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "base/error.h"
#include "base/text.h"

namespace tessera::data {
namespace {

constexpr std::size_t kMaxPatternBytes = 1u << 16;

/// Limit of steps of a search from one position of the text; PCRE2 counts anew at the next one. No sane pattern comes
/// near.
constexpr std::uint32_t kMatchLimit = 10'000'000;
constexpr std::uint32_t kHeapLimitKib = 1u << 16;  // used without JIT
constexpr std::size_t kStackBytes = 32u << 10;
constexpr std::size_t kMaxStackBytes = 8u << 20;

/// Unicode's White_Space, which is Oniguruma's \s. PCRE2's \s also has U+180E.
constexpr std::string_view kSpaces =
    "\\x{9}-\\x{d}\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}";
/// Oniguruma's \w. Outside of a class it also has the numbers below U+0100 that are not digits.
constexpr std::string_view kWordCharactersInClass = "\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}";
constexpr std::string_view kWordCharacters = "\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}\\x{b2}\\x{b3}\\x{b9}\\x{bc}-\\x{be}";

constexpr std::array<std::string_view, 37> kCategories{
    "C",  "Cc", "Cf", "Cn", "Co", "Cs", "L",  "Ll", "Lm", "Lo", "Lt", "Lu", "M",  "Mc", "Me", "Mn", "N",  "Nd", "Nl",
    "No", "P",  "Pc", "Pd", "Pe", "Pf", "Pi", "Po", "Ps", "S",  "Sc", "Sk", "Sm", "So", "Z",  "Zl", "Zp", "Zs"};

bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }
bool is_digit(char c) { return c >= '0' && c <= '9'; }

class Translator {
 public:
  Translator(std::string_view pattern, const std::string& place) : pattern_(pattern), place_(place) {}

  std::string translate() {
    while (!done()) step();
    if (depth_ != 0) unsupported("a parenthesis that is not closed");
    return std::move(out_);
  }

 private:
  bool done() const { return at_ == pattern_.size(); }
  bool starts_with(std::string_view text) const { return pattern_.substr(at_).starts_with(text); }
  char peek() const { return done() ? '\0' : pattern_[at_]; }

  [[noreturn]] void unsupported(std::string_view what) const {
    fail("{}: the pattern {}, byte {}: {} is not supported", place_, quote_text(pattern_), at_, what);
  }

  void copy(std::size_t size) {
    out_.append(pattern_.substr(at_, size));
    at_ += size;
  }

  void step() {
    const char c = peek();
    switch (c) {
      case '\\':
        escape(/*in_class=*/false);
        return;
      case '[':
        character_class();
        return;
      case '(':
        open_group();
        return;
      case ')':
        if (depth_ == 0) unsupported("a parenthesis that was not opened");
        --depth_;
        if (depth_ < caseless_depth_) caseless_depth_ = 0;
        copy(1);
        return;
      case '^':  // matches at the beginning of every line, as in Ruby
        out_ += "(?:\\A|(?<=\\n)(?!\\z))";
        ++at_;
        return;
      case '$':  // matches at the end of every line, and of the empty one after a last line feed
        out_ += "(?=\\n|\\z)";
        ++at_;
        return;
      case '{':
        interval();
        return;
      case '*':
      case '+':
      case '?':
        copy(1);
        if (peek() == '?' || peek() == '+') copy(1);
        if (peek() == '*' || peek() == '+' || peek() == '?') unsupported("a quantifier of a quantifier");
        return;
      case '}':
      case ']':
        out_ += '\\';
        copy(1);
        return;
      case '\0':
        unsupported("a NUL");
      default:
        literal();
    }
  }

  /// Both libraries fold the case of single ASCII letters in the same way. Oniguruma also folds sequences such as "ss",
  /// which are equal to one character.
  void literal() {
    if (caseless_depth_ > 0) {
      if (static_cast<std::uint8_t>(peek()) >= 0x80) unsupported("a letter beyond ASCII without regard to case");
      const std::string_view rest = pattern_.substr(at_);
      for (const std::string_view pair : {"ss", "st", "ff", "fi", "fl"}) {
        const bool found = rest.size() >= 2 && (rest[0] | 0x20) == pair[0] && (rest[1] | 0x20) == pair[1];
        if (found) unsupported("letters of a ligature without regard to case");
      }
    }
    copy(1);
  }

  void open_group() {
    for (const std::string_view opening : {"(?:", "(?=", "(?!", "(?<=", "(?<!", "(?>"}) {
      if (starts_with(opening)) {
        ++depth_;
        copy(opening.size());
        return;
      }
    }
    if (starts_with("(?i:")) {
      ++depth_;
      if (caseless_depth_ == 0) caseless_depth_ = depth_;
      copy(4);
      return;
    }
    if (starts_with("(?") || starts_with("(*")) unsupported("this kind of group");
    ++depth_;
    ++at_;
    out_ += "(?:";  // nothing reads the group's text
  }

  /// Translates {n}, {n,}, {n,m} and {,m}.
  void interval() {
    const std::size_t end = pattern_.find('}', at_);
    if (end == std::string_view::npos) unsupported("a brace that is not closed");
    const std::string_view body = pattern_.substr(at_ + 1, end - at_ - 1);
    const std::size_t comma = std::min(body.find(','), body.size());
    const auto is_number = [](std::string_view text) { return std::all_of(text.begin(), text.end(), is_digit); };
    const std::string_view low = body.substr(0, comma);
    const std::string_view high = body.substr(std::min(comma + 1, body.size()));
    if (!is_number(low) || !is_number(high) || (low.empty() && high.empty())) unsupported("a brace by itself");
    out_ += fmt::format("{{{}{}{}}}", low.empty() ? "0" : low, comma < body.size() ? "," : "", high);
    at_ = end + 1;
    // In Ruby's syntax "+" repeats the repetition, and "?" after {n} makes it optional.
    if (peek() == '+' || peek() == '*' || peek() == '{' || (peek() == '?' && comma == body.size())) {
      unsupported("a quantifier of an interval");
    }
    if (peek() == '?') copy(1);
  }

  /// Translates an escape. Returns whether it can be an end of a range.
  bool escape(bool in_class) {
    if (at_ + 1 == pattern_.size()) unsupported("a backslash at the end");
    const char c = pattern_[at_ + 1];
    const auto put = [&](std::string_view text) {
      out_ += text;
      at_ += 2;
    };
    const auto put_set = [&](std::string_view members, bool negated) {
      if (in_class && negated) unsupported("a negated class within a class");
      put(in_class ? members : fmt::format("[{}{}]", negated ? "^" : "", members));
    };
    switch (c) {
      case 'r':
      case 'n':
      case 't':
      case 'f':
      case 'a':
      case 'e':
        copy(2);
        return true;
      case 'v':
        put("\\x{b}");
        return true;
      case 's':
      case 'S':
        if (in_class && c == 'S') {
          put("\\P{White_Space}");
        } else {
          put_set(kSpaces, c == 'S');
        }
        return false;
      case 'w':
      case 'W':
        put_set(in_class ? kWordCharactersInClass : kWordCharacters, c == 'W');
        return false;
      case 'd':
      case 'D':
        put(c == 'd' ? "\\p{Nd}" : "\\P{Nd}");
        return false;
      case 'A':
      case 'z':
        if (in_class) unsupported("an anchor in a class");
        copy(2);
        return false;
      case 'p':
      case 'P':
        property();
        return false;
      case 'x':
      case 'u':
        code_point();
        return true;
      default:
        // Other letters and digits differ between the libraries. All other characters stand for themselves.
        if (is_letter(c) || is_digit(c) || c == '\0') unsupported(fmt::format("\\{}", c));
        if (static_cast<std::uint8_t>(c) >= 0x80) {
          ++at_;
          literal();
        } else {
          copy(2);
        }
        return true;
    }
  }

  /// Translates \p{L}, \P{L} and \p{^L}, for general categories and scripts.
  void property() {
    bool negated = pattern_[at_ + 1] == 'P';
    const std::size_t end = pattern_.find('}', at_);
    if (at_ + 2 >= pattern_.size() || pattern_[at_ + 2] != '{' || end == std::string_view::npos) {
      unsupported("a property without braces");
    }
    std::string_view name = pattern_.substr(at_ + 3, end - at_ - 3);
    if (name.starts_with('^')) {
      negated = !negated;
      name.remove_prefix(1);
    }
    const bool is_name =
        !name.empty() && std::all_of(name.begin(), name.end(), [](char c) { return is_letter(c) || c == '_'; });
    if (!is_name) unsupported("this property");
    const bool is_category = std::find(kCategories.begin(), kCategories.end(), name) != kCategories.end();
    if (caseless_depth_ > 0 && name.starts_with('L')) unsupported("a property of letters without regard to case");
    // A script's name alone would mean to PCRE2 all characters that are used in the script.
    out_ += fmt::format("\\{}{{{}{}}}", negated ? 'P' : 'p', is_category ? "" : "sc:", name);
    at_ = end + 1;
  }

  /// Translates \x{H...}, \uHHHH and \x7F. A larger \xHH is a byte to Oniguruma, and is not supported.
  void code_point() {
    const bool is_u = pattern_[at_ + 1] == 'u';
    std::string_view digits;
    std::size_t size = 0;
    if (!is_u && pattern_.substr(at_ + 2).starts_with('{')) {
      const std::size_t end = std::min(pattern_.find('}', at_), pattern_.size());
      digits = pattern_.substr(at_ + 3, end - at_ - 3);
      size = end - at_ + 1;
    } else {
      digits = pattern_.substr(at_ + 2, is_u ? 4 : 2);
      size = 2 + digits.size();
      if (digits.size() != (is_u ? 4u : 2u) || (!is_u && digits[0] > '7')) unsupported("this code of a character");
    }
    const bool is_number =
        !digits.empty() && digits.size() <= 6 && std::all_of(digits.begin(), digits.end(), [](char c) {
          return is_digit(c) || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F');
        });
    if (!is_number) unsupported("this code of a character");
    if (caseless_depth_ > 0) unsupported("a code of a character without regard to case");
    out_ += fmt::format("\\x{{{}}}", digits);
    at_ += size;
  }

  void character_class() {
    copy(1);
    if (peek() == '^') copy(1);
    if (peek() == ']') unsupported("']' as the first of a class");
    if (caseless_depth_ > 0) unsupported("a class without regard to case");
    bool range_is_open = false;    // after "a-"
    bool can_begin_range = false;  // after a single character
    while (peek() != ']') {
      if (done()) unsupported("a class that is not closed");
      const char c = peek();
      if (c == '[') unsupported("a class within a class");
      if (starts_with("&&")) unsupported("an intersection of classes");
      if (c == '\0') unsupported("a NUL");
      const bool is_dash = c == '-' && at_ + 1 < pattern_.size() && pattern_[at_ + 1] != ']';
      if (is_dash && can_begin_range) {
        copy(1);
        range_is_open = true;
        can_begin_range = false;
        continue;
      }
      bool is_single = true;
      if (c == '\\') {
        is_single = escape(/*in_class=*/true);
      } else if (c == '-') {
        out_ += '\\';
        copy(1);
      } else {
        copy(1);
        while (!done() && is_continuation(peek())) copy(1);
      }
      if (range_is_open && !is_single) unsupported("a range that ends in a class");
      can_begin_range = is_single && !range_is_open;
      range_is_open = false;
    }
    copy(1);
  }

  std::string_view pattern_;
  const std::string& place_;
  std::size_t at_ = 0;
  std::string out_;
  int depth_ = 0;
  int caseless_depth_ = 0;  // depth of the outermost (?i: group; 0 outside of any
};

std::string message_of(int error) {
  std::array<PCRE2_UCHAR, 256> text{};
  pcre2_get_error_message(error, text.data(), text.size());
  return reinterpret_cast<const char*>(text.data());
}

PCRE2_SPTR units(std::string_view text) {
  return text.empty() ? reinterpret_cast<PCRE2_SPTR>("") : reinterpret_cast<PCRE2_SPTR>(text.data());
}

}  // namespace

std::string to_pcre2(std::string_view pattern, const std::string& place) {
  return Translator(pattern, place).translate();
}

RegexScratch::RegexScratch()
    : match_data_(pcre2_match_data_create(1, nullptr)),
      context_(pcre2_match_context_create(nullptr)),
      stack_(pcre2_jit_stack_create(kStackBytes, kMaxStackBytes, nullptr)) {
  if (match_data_ == nullptr || context_ == nullptr) throw std::bad_alloc();
  pcre2_set_match_limit(context_, kMatchLimit);
  pcre2_set_heap_limit(context_, kHeapLimitKib);
  if (stack_ != nullptr) pcre2_jit_stack_assign(context_, nullptr, stack_);
}

RegexScratch::~RegexScratch() {
  pcre2_match_data_free(match_data_);
  pcre2_match_context_free(context_);
  pcre2_jit_stack_free(stack_);
}

Regex::Regex(std::string_view pattern, std::string place) : place_(std::move(place)) {
  require(pattern.size() <= kMaxPatternBytes, "{}: a pattern of {} bytes, expected at most {}", place_, pattern.size(),
          kMaxPatternBytes);
  compile(to_pcre2(pattern, place_), pattern, PCRE2_UCP);
}

Regex Regex::literal(std::string_view text, std::string place) {
  Regex regex;
  regex.place_ = std::move(place);
  regex.compile(text, text, PCRE2_LITERAL);
  return regex;
}

Regex Regex::pcre2(std::string_view pattern, std::string place) {
  Regex regex;
  regex.place_ = std::move(place);
  regex.compile(pattern, pattern, PCRE2_UCP);
  return regex;
}

void Regex::compile(std::string_view pcre2_pattern, std::string_view written, unsigned options) {
  int error = 0;
  PCRE2_SIZE offset = 0;
  pcre2_compile_context* context = pcre2_compile_context_create(nullptr);
  pcre2_set_newline(context,
                    PCRE2_NEWLINE_LF);  // "." does not match it; the library's build has its own default
  code_ = pcre2_compile(units(pcre2_pattern), pcre2_pattern.size(), PCRE2_UTF | options, &error, &offset, context);
  pcre2_compile_context_free(context);
  if (code_ == nullptr) {
    fail("{}: PCRE2 refuses the pattern {}: {}", place_, quote_text(written), message_of(error));
  }
  has_jit_ = pcre2_jit_compile(code_, PCRE2_JIT_COMPLETE) == 0;
}

Regex::~Regex() { pcre2_code_free(code_); }

Regex::Regex(Regex&& other) noexcept
    : place_(std::move(other.place_)), code_(std::exchange(other.code_, nullptr)), has_jit_(other.has_jit_) {}

bool Regex::find(std::string_view text, std::size_t at, RegexScratch& scratch, Match& match) const {
  const int result =
      has_jit_
          ? pcre2_jit_match(code_, units(text), text.size(), at, 0, scratch.match_data_, scratch.context_)
          : pcre2_match(code_, units(text), text.size(), at, PCRE2_NO_UTF_CHECK, scratch.match_data_, scratch.context_);
  if (result == PCRE2_ERROR_NOMATCH) return false;
  require(result >= 0, "{}: the pattern fails on a text of {} bytes: {}", place_, text.size(), message_of(result));
  const PCRE2_SIZE* offsets = pcre2_get_ovector_pointer(scratch.match_data_);
  match = {.begin = offsets[0], .end = offsets[1]};
  return true;
}

}  // namespace tessera::data
