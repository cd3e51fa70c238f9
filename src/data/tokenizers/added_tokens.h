// Finds added tokens in the raw text, before it is split into words.
//
// It works like the `tokenizers` library. Of the tokens that begin first, it takes the longest, and continues the
// search after it. It searches for tokens with `normalized` in the text between the others. If special tokens are plain
// text, it finds them, too, but leaves them in the text and searches for nothing within them.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "data/tokenizers/regex.h"
#include "data/tokenizers/tokenizer_json.h"

namespace tessera::data {

/// Describes a part of a text: an added token, or the text between added tokens.
struct TextPart {
  std::string_view text;
  std::int32_t id = -1;  // of the added token; -1 if it is none
};

class AddedTokens {
 public:
  AddedTokens() = default;
  explicit AddedTokens(std::vector<AddedToken> tokens);

  /// Cuts `text`, which must be UTF-8, into `parts`.
  void split(std::string_view text, bool special_is_text, RegexScratch& scratch, std::vector<TextPart>& parts) const;

 private:
  /// Holds a trie of bytes. The children of a node are one run of edges, sorted by byte.
  struct Trie {
    struct Node {
      std::uint32_t first_edge = 0;
      std::uint32_t num_edges = 0;
      std::int32_t token = -1;  // index into tokens_
    };
    struct Edge {
      std::uint8_t byte = 0;
      std::uint32_t node = 0;
    };
    std::vector<Node> nodes;
    std::vector<Edge> edges;
    std::array<bool, 256> begins{};  // bytes with which a token begins

    void build(std::span<const AddedToken> tokens, std::vector<std::int32_t> members);
    /// Returns the longest token at the beginning of `text`, or -1 if there is none.
    std::int32_t longest(std::string_view text) const;
  };

  void split_by(const Trie& trie, std::string_view text, bool special_is_text, RegexScratch& scratch,
                std::vector<TextPart>& parts) const;
  bool touches_word(std::string_view before, std::string_view after, RegexScratch& scratch) const;

  std::vector<AddedToken> tokens_;
  Trie raw_;
  Trie normalized_;
};

}  // namespace tessera::data
