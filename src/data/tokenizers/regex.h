// Regular expressions of tokenizers. They are written for Oniguruma, which the `tokenizers` library uses, but PCRE2
// runs them.
//
// The two differ in the meaning of some syntax: \s, \w, \h, $, scripts, nested classes, possessive intervals. So
// to_pcre2 translates a pattern, and throws Error for what has no exact counterpart.
//
// Each library has the characters of one version of Unicode. Characters that are newer than one of the two versions may
// be split differently.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

struct pcre2_real_code_8;
struct pcre2_real_match_context_8;
struct pcre2_real_match_data_8;
struct pcre2_real_jit_stack_8;

namespace tessera::data {

/// Holds the memory that a thread needs for matching. Any Regex can use it, one at a time.
class RegexScratch {
 public:
  RegexScratch();
  ~RegexScratch();
  RegexScratch(const RegexScratch&) = delete;
  RegexScratch& operator=(const RegexScratch&) = delete;

 private:
  friend class Regex;
  pcre2_real_match_data_8* match_data_ = nullptr;
  pcre2_real_match_context_8* context_ = nullptr;
  pcre2_real_jit_stack_8* stack_ = nullptr;
};

class Regex {
 public:
  struct Match {
    std::size_t begin = 0;
    std::size_t end = 0;
  };

  /// `place` says where the pattern is, for messages. Throws Error if it is not a pattern, or uses unsupported syntax.
  Regex(std::string_view pattern, std::string place);
  /// Makes a regular expression that matches exactly this text.
  static Regex literal(std::string_view text, std::string place);
  /// Compiles a pattern in PCRE2's own syntax, with UTF and UCP.
  static Regex pcre2(std::string_view pattern, std::string place);
  ~Regex();
  Regex(Regex&& other) noexcept;
  Regex& operator=(Regex&&) = delete;

  /// Finds the leftmost match that begins at or after `at`. `text` must be UTF-8, and `at` at most its size. It reads
  /// nothing outside of `text`. Throws Error if the pattern needs more steps than a limit at one position of the text.
  bool find(std::string_view text, std::size_t at, RegexScratch& scratch, Match& match) const;

 private:
  Regex() = default;
  /// `written` is the pattern as the file has it, for messages.
  void compile(std::string_view pcre2_pattern, std::string_view written, unsigned options);

  std::string place_;
  pcre2_real_code_8* code_ = nullptr;
  bool has_jit_ = false;
};

/// Returns the pattern in PCRE2's syntax, to be compiled with UTF and UCP.
std::string to_pcre2(std::string_view pattern, const std::string& place);

}  // namespace tessera::data
