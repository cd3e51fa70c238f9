// A small tokenizer.json. Each test changes the part that it is about.
#pragma once

#include <nlohmann/json.hpp>

#include "data/tokenizers/bpe.h"
#include "support.h"

namespace tessera::data {

using nlohmann::json;

inline json split(const std::string& pattern, const std::string& behavior, bool invert = false) {
  return {{"type", "Split"}, {"pattern", {{"Regex", pattern}}}, {"behavior", behavior}, {"invert", invert}};
}

inline json byte_level(bool use_regex, bool add_prefix_space = false) {
  return {
      {"type", "ByteLevel"}, {"add_prefix_space", add_prefix_space}, {"trim_offsets", true}, {"use_regex", use_regex}};
}

inline json sequence(std::vector<json> members) { return {{"type", "Sequence"}, {"pretokenizers", members}}; }

inline json added_token(std::int32_t id, const std::string& content, bool special = false) {
  return {{"id", id},        {"content", content},  {"single_word", false}, {"lstrip", false},
          {"rstrip", false}, {"normalized", false}, {"special", special}};
}

/// Returns a tokenizer.json in which ids 0 to 255 are the bytes. They are followed by "ab", "bc", "abc" and " a", whose
/// merges are in the order ab, bc, a+bc, " "+a. BOS and EOS are the last ids, and the vocabulary has them, too.
inline json small_tokenizer() {
  json vocab = json::object();
  for (int byte = 0; byte < 256; ++byte) vocab[byte_level_text(static_cast<std::uint8_t>(byte))] = byte;
  vocab["ab"] = 256;
  vocab["bc"] = 257;
  vocab["abc"] = 258;
  vocab["\u0120a"] = 259;
  vocab["<s>"] = 260;
  vocab["</s>"] = 261;
  return {{"version", "1.0"},
          {"truncation", nullptr},
          {"padding", nullptr},
          {"added_tokens", {added_token(260, "<s>", true), added_token(261, "</s>", true)}},
          {"normalizer", nullptr},
          {"pre_tokenizer", byte_level(true)},
          {"post_processor", nullptr},
          {"decoder", byte_level(true)},
          {"model",
           {{"type", "BPE"},
            {"dropout", nullptr},
            {"unk_token", nullptr},
            {"continuing_subword_prefix", nullptr},
            {"end_of_word_suffix", nullptr},
            {"fuse_unk", false},
            {"byte_fallback", false},
            {"ignore_merges", false},
            {"vocab", vocab},
            {"merges", {"a b", "b c", "a bc", "\u0120 a"}}}}};
}

}  // namespace tessera::data
