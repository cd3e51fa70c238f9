// The file tokenizer.json, as the `tokenizers` library writes it, read into plain structs.
//
// What is accepted: byte-level BPE without a normalizer, pre-tokenized by Split, Digits and ByteLevel, decoded by
// ByteLevel. This is what GPT-2, Llama 3, DeepSeek-V3 and most models since use. Anything else is an Error that
// names the file and the field: text is never tokenized by half of what the file says.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tessera::data {

/// A token that is looked for in the raw text, before all else.
struct AddedToken {
  std::int32_t id = 0;
  std::string content;
  bool single_word = false;  // only where no letter, digit, mark or underscore touches it
  bool lstrip = false;       // takes the white space before it with it
  bool rstrip = false;       // and after it
  bool normalized = false;   // looked for after those that are not
  bool special = false;      // controls a model: gives no text
};

/// What becomes of the parts of a text that a pattern matches.
enum class SplitBehavior { kIsolated, kRemoved, kMergedWithPrevious, kMergedWithNext, kContiguous };

struct SplitSpec {
  std::string place;    // in the file, for messages
  std::string pattern;  // in the syntax of Oniguruma, or a string
  bool is_regex = true;
  SplitBehavior behavior = SplitBehavior::kIsolated;
  bool invert = false;  // what does not match counts as a match
};

/// The splits, one after the other, then ByteLevel: first its prefix, then its pattern.
struct PreTokenizerSpec {
  std::vector<SplitSpec> splits;
  bool add_prefix_space = false;
  bool byte_level_regex = false;
};

struct BpeSpec {
  std::vector<std::pair<std::string, std::int32_t>> vocab;  // no token and no id twice; sorted by id
  std::vector<std::pair<std::int32_t, std::int32_t>> merges;
  std::vector<std::int32_t> merged;  // what merges[i] makes
  bool ignore_merges = false;        // a word that is a token is not merged from its bytes
};

struct TokenizerJson {
  BpeSpec model;
  std::vector<AddedToken> added_tokens;  // no content and no id twice, none at odds with the model's vocabulary
  PreTokenizerSpec pre_tokenizer;
  std::string template_bos;  // what the post-processor puts in front; empty if nothing
  std::string template_eos;
  std::int32_t vocab_size = 0;  // the largest id + 1; there may be ids without a token
};

/// `content` is the file's, `path` is for messages. Memory and time are proportional to the content.
TokenizerJson parse_tokenizer_json(std::string_view content, const std::filesystem::path& path);

/// bos_token and eos_token of a tokenizer_config.json.
struct TokenizerConfigJson {
  bool names_bos = false;  // the file has the field (it may be null: then the string is empty)
  std::string bos_token;
  std::string eos_token;
};

TokenizerConfigJson parse_tokenizer_config_json(std::string_view content, const std::filesystem::path& path);

}  // namespace tessera::data
