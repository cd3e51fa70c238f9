// Quotes commands that a message shows, so that they can be pasted into a shell.
#pragma once

#include <algorithm>
#include <cctype>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// Returns `word` with the quotes that a shell needs to read it as one word.
inline std::string shell_word(std::string_view word) {
  const bool plain = !word.empty() && std::ranges::all_of(word, [](char ch) {
    return std::isalnum(static_cast<unsigned char>(ch)) != 0 ||
           std::string_view("-_./=,:+@%").find(ch) != std::string_view::npos;
  });
  if (plain) return std::string(word);
  std::string text = "'";
  for (const char ch : word) text += ch == '\'' ? "'\\''" : std::string(1, ch);
  return text + "'";
}

/// Returns the words, each quoted as necessary, with spaces between them.
inline std::string shell_line(const std::vector<std::string>& words) {
  std::string line;
  for (const std::string& word : words) line += (line.empty() ? "" : " ") + shell_word(word);
  return line;
}

}  // namespace tessera
