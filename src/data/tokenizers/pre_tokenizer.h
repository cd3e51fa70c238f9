// Cuts text into words, as the pre-tokenizer of a tokenizer.json says. BPE merges bytes only within a word.
//
// Each split gets the parts that the split before it has made. It treats each part by itself, without its neighbours.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/text.h"
#include "data/tokenizers/regex.h"
#include "data/tokenizers/tokenizer_json.h"

namespace tessera::data {

class PreTokenizer {
 public:
  explicit PreTokenizer(const PreTokenizerSpec& spec);

  /// Calls `word(std::string_view)` for every word of `text`, which must be UTF-8, in order. No word is empty.
  template <typename Word>
  void split(std::string_view text, RegexScratch& scratch, Word&& word) const {
    split_from(0, text, scratch, word);
  }

 private:
  struct Stage {
    Regex regex;
    SplitBehavior behavior;
    bool invert;
  };

  template <typename Word>
  void split_from(std::size_t stage_idx, std::string_view text, RegexScratch& scratch, Word& word) const;

  std::vector<Stage> stages_;
  std::size_t prefix_stage_ = 0;  // a space is put in front of each text that enters this stage
  bool add_prefix_space_ = false;
};

/// Applies a split's behavior to its spans, which are added in order as they are found: matches and the text between
/// them. Calls `part(begin, end)` for each part that goes on to the next stage.
class SpanMerger {
 public:
  explicit SpanMerger(SplitBehavior behavior) : behavior_(behavior) {}

  template <typename Part>
  void add(std::size_t begin, std::size_t end, bool is_match, Part&& part) {
    const bool same_as_before = has_pending_ && is_match == pending_is_match_;
    bool joins = false;
    switch (behavior_) {
      case SplitBehavior::kIsolated:
        part(begin, end);
        return;
      case SplitBehavior::kRemoved:
        if (!is_match) part(begin, end);
        return;
      case SplitBehavior::kContiguous:
        joins = same_as_before;
        break;
      case SplitBehavior::kMergedWithPrevious:
        joins = has_pending_ && is_match && !pending_is_match_;
        break;
      case SplitBehavior::kMergedWithNext:
        joins = has_pending_ && !is_match && pending_is_match_;
        break;
    }
    if (!joins) {
      finish(part);
      pending_begin_ = begin;
    }
    pending_end_ = end;
    pending_is_match_ = is_match;
    has_pending_ = true;
  }

  template <typename Part>
  void finish(Part&& part) {
    if (has_pending_) part(pending_begin_, pending_end_);
    has_pending_ = false;
  }

 private:
  SplitBehavior behavior_;
  bool has_pending_ = false;
  bool pending_is_match_ = false;  // of the last span in the pending part
  std::size_t pending_begin_ = 0;
  std::size_t pending_end_ = 0;
};

template <typename Word>
void PreTokenizer::split_from(std::size_t stage_idx, std::string_view text, RegexScratch& scratch, Word& word) const {
  if (text.empty()) return;
  std::string prefixed;
  if (add_prefix_space_ && stage_idx == prefix_stage_ && text.front() != ' ') {
    prefixed.append(" ").append(text);
    text = prefixed;
  }
  if (stage_idx == stages_.size()) {
    word(text);
    return;
  }
  const Stage& stage = stages_[stage_idx];
  const bool is_last = stage_idx + 1 == stages_.size() && !(add_prefix_space_ && prefix_stage_ == stages_.size());
  const auto next = [&](std::size_t begin, std::size_t end) {
    if (begin == end) return;
    if (is_last) {
      word(text.substr(begin, end - begin));
    } else {
      split_from(stage_idx + 1, text.substr(begin, end - begin), scratch, word);
    }
  };
  SpanMerger spans(stage.behavior);
  std::size_t done = 0;
  std::size_t at = 0;
  bool has_matched = false;
  Regex::Match match;
  while (at <= text.size() && stage.regex.find(text, at, scratch, match)) {
    if (has_matched && match.begin == match.end &&
        match.end == done) {  // an empty match right after a match does not count
      do ++at;
      while (at < text.size() && is_continuation(text[at]));
      continue;
    }
    if (done != match.begin) spans.add(done, match.begin, stage.invert, next);
    spans.add(match.begin, match.end, !stage.invert, next);
    done = at = match.end;
    has_matched = true;
  }
  if (done != text.size()) spans.add(done, text.size(), stage.invert, next);
  spans.finish(next);
}

}  // namespace tessera::data
