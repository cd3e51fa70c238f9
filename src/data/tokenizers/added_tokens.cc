#include "data/tokenizers/added_tokens.h"

#include <algorithm>

#include "base/error.h"
#include "base/text.h"

namespace tessera::data {
namespace {

std::size_t character_begin(std::string_view text, std::size_t end) {
  std::size_t at = end - 1;
  while (at > 0 && is_continuation(text[at])) --at;
  return at;
}

std::size_t space_begin(std::string_view text) {
  std::size_t begin = text.size();
  while (begin > 0) {
    const std::size_t at = character_begin(text, begin);
    if (space_size(text.substr(at, begin - at)) == 0) break;
    begin = at;
  }
  return begin;
}

std::size_t space_end(std::string_view text) {
  std::size_t end = 0;
  while (const std::size_t size = space_size(text.substr(end))) end += size;
  return end;
}

/// Returns whether the character is in \w of Rust's regular expressions, which the `tokenizers` library uses here.
bool is_word_character(std::string_view character, RegexScratch& scratch) {
  static const Regex regex = Regex::pcre2("[\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}\\p{Join_Control}]", "single_word");
  Regex::Match match;
  return regex.find(character, 0, scratch, match);
}

}  // namespace

void AddedTokens::Trie::build(std::span<const AddedToken> tokens, std::vector<std::int32_t> members) {
  if (members.empty()) return;
  const auto content = [&](std::int32_t i) -> const std::string& {
    return tokens[static_cast<std::size_t>(i)].content;
  };
  std::sort(members.begin(), members.end(), [&](auto a, auto b) { return content(a) < content(b); });
  // A node is a range of the sorted tokens that share their first `depth` bytes. Nodes are processed in order.
  struct Range {
    std::size_t begin, end, depth;
  };
  std::vector<Range> ranges{{0, members.size(), 0}};
  nodes.emplace_back();
  for (std::size_t node = 0; node < nodes.size(); ++node) {
    auto [begin, end, depth] = ranges[node];
    if (content(members[begin]).size() == depth) nodes[node].token = members[begin++];
    nodes[node].first_edge = static_cast<std::uint32_t>(edges.size());
    while (begin < end) {
      const char byte = content(members[begin])[depth];
      std::size_t next = begin + 1;
      while (next < end && content(members[next])[depth] == byte) ++next;
      edges.push_back({.byte = static_cast<std::uint8_t>(byte), .node = static_cast<std::uint32_t>(nodes.size())});
      nodes.emplace_back();
      ranges.push_back({begin, next, depth + 1});
      begin = next;
    }
    nodes[node].num_edges = static_cast<std::uint32_t>(edges.size()) - nodes[node].first_edge;
  }
  for (std::uint32_t i = 0; i < nodes[0].num_edges; ++i) begins[edges[i].byte] = true;
}

std::int32_t AddedTokens::Trie::longest(std::string_view text) const {
  std::int32_t found = -1;
  const Node* node = &nodes[0];
  for (const char c : text) {
    const Edge* const begin = edges.data() + node->first_edge;
    const Edge* const end = begin + node->num_edges;
    const Edge* const edge = std::lower_bound(begin, end, static_cast<std::uint8_t>(c),
                                              [](const Edge& e, std::uint8_t byte) { return e.byte < byte; });
    if (edge == end || edge->byte != static_cast<std::uint8_t>(c)) break;
    node = &nodes[edge->node];
    if (node->token >= 0) found = node->token;
  }
  return found;
}

AddedTokens::AddedTokens(std::vector<AddedToken> tokens) : tokens_(std::move(tokens)) {
  std::vector<std::int32_t> raw;
  std::vector<std::int32_t> normalized;
  for (std::size_t i = 0; i < tokens_.size(); ++i) {
    (tokens_[i].normalized ? normalized : raw).push_back(static_cast<std::int32_t>(i));
  }
  raw_.build(tokens_, std::move(raw));
  normalized_.build(tokens_, std::move(normalized));
}

bool AddedTokens::touches_word(std::string_view before, std::string_view after, RegexScratch& scratch) const {
  if (!before.empty() && is_word_character(before.substr(character_begin(before, before.size())), scratch)) return true;
  if (after.empty()) return false;
  std::size_t size = 1;
  while (size < after.size() && is_continuation(after[size])) ++size;
  return is_word_character(after.substr(0, size), scratch);
}

void AddedTokens::split_by(const Trie& trie, std::string_view text, bool special_is_text, RegexScratch& scratch,
                           std::vector<TextPart>& parts) const {
  std::size_t done = 0;
  for (std::size_t at = 0; !trie.nodes.empty() && at < text.size();) {
    const std::int32_t found = trie.begins[static_cast<std::uint8_t>(text[at])] ? trie.longest(text.substr(at)) : -1;
    if (found < 0) {
      ++at;
      continue;
    }
    const AddedToken& token = tokens_[static_cast<std::size_t>(found)];
    std::size_t begin = at;
    std::size_t end = at + token.content.size();
    at = end;
    if (special_is_text && token.special) continue;
    if (token.single_word && touches_word(text.substr(0, begin), text.substr(end), scratch)) continue;
    if (begin < done) continue;  // the token before took this white space; docs/data.md, 'Two differences are known'
    if (token.lstrip) begin = done + space_begin(text.substr(done, begin - done));
    if (token.rstrip) end += space_end(text.substr(end));
    if (done < begin) parts.push_back({.text = text.substr(done, begin - done)});
    parts.push_back({.text = text.substr(begin, end - begin), .id = token.id});
    done = end;
  }
  if (done < text.size()) parts.push_back({.text = text.substr(done)});
}

void AddedTokens::split(std::string_view text, bool special_is_text, RegexScratch& scratch,
                        std::vector<TextPart>& parts) const {
  parts.clear();
  split_by(raw_, text, special_is_text, scratch, parts);
  if (normalized_.nodes.empty()) return;
  std::vector<TextPart> more;
  for (const TextPart& part : parts) {
    if (part.id >= 0) {
      more.push_back(part);
    } else {
      split_by(normalized_, part.text, special_is_text, scratch, more);
    }
  }
  parts = std::move(more);
}

}  // namespace tessera::data
