// Finds the word that a mistyped one was meant to be.
#pragma once

#include <algorithm>
#include <numeric>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tessera {

/// Returns how many edits turn one word into the other. An edit inserts, deletes or substitutes a character, or
/// exchanges two neighbours (Damerau-Levenshtein, in the form that edits no place twice).
inline std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> before_last(b.size() + 1), last(b.size() + 1), row(b.size() + 1);
  std::iota(last.begin(), last.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1)});
      const bool exchanged = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
      if (exchanged) row[j] = std::min(row[j], before_last[j - 2] + 1);
    }
    std::swap(before_last, last);
    std::swap(last, row);
  }
  return last.back();
}

/// Returns whether `word` may be a typing error for a word at this distance. It allows one edit for every three
/// letters, and at least one.
inline bool is_slip(std::string_view word, std::size_t distance) {
  return distance <= std::max<std::size_t>(1, word.size() / 3);
}

/// Returns the nearest of `words`, or "" if `word` is not a typing error for any of them.
inline std::string nearest_word(std::string_view word, const std::vector<std::string>& words) {
  const auto distance = [&](const std::string& other) { return edit_distance(word, other); };
  const auto nearest = std::ranges::min_element(words, {}, distance);
  return nearest != words.end() && is_slip(word, distance(*nearest)) ? *nearest : "";
}

}  // namespace tessera
