// Regular expressions of tokenizers: written for Oniguruma, which the `tokenizers` library uses, and run by PCRE2.
//
// The two differ in what some of the syntax means: \s, \w, \h, $, scripts, nested classes, possessive intervals. A
// pattern is therefore read and written anew (to_pcre2), and what has no exact counterpart is an Error.
//
// Both know the characters of a version of Unicode. Characters that are younger than one of the two libraries may be
// split differently.
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

/// What a thread needs to match. Any Regex can use it, one at a time.
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

  /// `place` says where the pattern stands, for messages. Error if it is not a pattern, or uses what is not supported.
  Regex(std::string_view pattern, std::string place);
  /// Matches the text itself.
  static Regex literal(std::string_view text, std::string place);
  /// Compiles a pattern in PCRE2's own syntax, with UTF and UCP.
  static Regex pcre2(std::string_view pattern, std::string place);
  ~Regex();
  Regex(Regex&& other) noexcept;
  Regex& operator=(Regex&&) = delete;

  /// The leftmost match that begins at or after `at`. `text` must be UTF-8, `at` at most its size; nothing outside
  /// `text` is looked at. Error if the pattern needs more steps than a limit at one place of the text.
  bool find(std::string_view text, std::size_t at, RegexScratch& scratch, Match& match) const;

 private:
  Regex() = default;
  void compile(std::string_view pcre2_pattern, unsigned options);

  std::string place_;
  pcre2_real_code_8* code_ = nullptr;
  bool has_jit_ = false;
};

/// The pattern in PCRE2's syntax, to be compiled with UTF and UCP.
std::string to_pcre2(std::string_view pattern, const std::string& place);

}  // namespace tessera::data
