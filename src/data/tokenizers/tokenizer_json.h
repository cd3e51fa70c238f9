// Reads tokenizer.json, the file that the `tokenizers` library writes, into plain structs.
//
// It accepts byte-level BPE without a normalizer, pre-tokenized by Split, Digits and ByteLevel, and decoded by
// ByteLevel. GPT-2, Llama 3, DeepSeek-V3 and most models since use this. Anything else is an Error that names the file
// and the field: text is never tokenized by only half of what the file says.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tessera::data {

/// Describes a token that is searched for in the raw text, before anything else.
struct AddedToken {
  std::int32_t id = 0;
  std::string content;
  bool single_word = false;  // found only where no letter, digit, mark or underscore touches it
  bool lstrip = false;       // includes the white space before it
  bool rstrip = false;       // includes the white space after it
  bool normalized = false;   // searched for after the tokens without this flag
  bool special = false;      // controls a model, so it gives no text
};

/// Says what a split does with the parts of a text that its pattern matches.
enum class SplitBehavior { kIsolated, kRemoved, kMergedWithPrevious, kMergedWithNext, kContiguous };

struct SplitSpec {
  std::string place;    // where it is in the file, for messages
  std::string pattern;  // in Oniguruma's syntax, or plain text
  bool is_regex = true;
  SplitBehavior behavior = SplitBehavior::kIsolated;
  bool invert = false;  // the text between matches counts as matches
};

/// Holds the splits, in order, and ByteLevel after them: first its prefix, then its pattern.
struct PreTokenizerSpec {
  std::vector<SplitSpec> splits;
  bool add_prefix_space = false;
  bool byte_level_regex = false;
};

struct BpeSpec {
  std::vector<std::pair<std::string, std::int32_t>> vocab;  // each token and each id occurs once; sorted by id
  std::vector<std::pair<std::int32_t, std::int32_t>> merges;
  std::vector<std::int32_t> merged;  // the id that merges[i] makes
  bool ignore_merges = false;        // a word that is a token gets its id without merging bytes
};

struct TokenizerJson {
  BpeSpec model;
  std::vector<AddedToken> added_tokens;  // each content and each id occurs once; consistent with the model's vocabulary
  PreTokenizerSpec pre_tokenizer;
  std::string template_bos;  // the token that the post-processor puts in front; empty: none
  std::string template_eos;
  std::int32_t vocab_size = 0;  // the largest id + 1; some ids may have no token
};

/// Parses the content of a file. `path` is for messages. Memory and time are proportional to the size of the content.
TokenizerJson parse_tokenizer_json(std::string_view content, const std::filesystem::path& path);

/// Holds the tokens that a tokenizer_config.json names.
struct TokenizerConfigJson {
  bool names_bos = false;  // the file has the field; if it is null, bos_token is empty
  std::string bos_token;
  std::string eos_token;
  std::map<std::uint64_t, std::string> added_tokens;  // of added_tokens_decoder, by the ids there
};

TokenizerConfigJson parse_tokenizer_config_json(std::string_view content, const std::filesystem::path& path);

}  // namespace tessera::data
