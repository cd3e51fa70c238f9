// Tokenizers of Hugging Face's tokenizer.json: byte-level BPE (see tokenizer_json.h for what is accepted).
//
// Gives the ids that the `tokenizers` library gives. What a model's control tokens look like in a text can be treated
// in two ways:
//  * `encode` takes the text of a special token for text, as the library does with encode_special_tokens = true (but
//  under
//    ignore_merges as well). So no document can end itself by what is written in it. Added tokens that the file does
//    not call special are found; DeepSeek-V3's <｜User｜> is one.
//  * `encode_with_special` finds special tokens as well: the library's encode(text, add_special_tokens=False).
// Neither adds BOS or EOS. Truncation and padding, which a file may ask for, are not done.
//
// A text comes back as it was, but for `add_prefix_space`, `lstrip`, `rstrip`, the behaviour Removed, and bytes without
// a token. decode gives exactly the bytes that the tokens stand for, where the library puts U+FFFD for ill-formed
// UTF-8.
#pragma once

#include <memory>
#include <mutex>
#include <optional>

#include "data/tokenizers/added_tokens.h"
#include "data/tokenizers/bpe.h"
#include "data/tokenizers/pre_tokenizer.h"
#include "data/tokenizers/tokenizer.h"

namespace tessera::data {

class HfTokenizer final : public Tokenizer {
 public:
  /// Reads `path` and, if there is one beside it, tokenizer_config.json. BOS and EOS are those of tokenizer_config.json
  /// (without a BOS, EOS is used for it; a name that the vocabulary lacks gets the next id), else those that the
  /// post-processor adds, else well-known names. Warns if there are bytes without a token: text with them is not whole
  /// after encoding.
  explicit HfTokenizer(const std::filesystem::path& path);
  ~HfTokenizer() override;

  std::string_view kind() const override { return "huggingface"; }
  /// The largest id + 1. Ids without a token may be among them.
  std::int32_t vocab_size() const override { return static_cast<std::int32_t>(token_begin_.size()) - 1; }
  std::int32_t bos_id() const override { return bos_id_; }
  std::int32_t eos_id() const override { return eos_id_; }
  /// Ill-formed UTF-8 in `text` becomes U+FFFD.
  std::vector<std::int32_t> encode(std::string_view text) const override;
  std::vector<std::int32_t> encode_with_special(std::string_view text) const;
  std::string decode(std::span<const std::int32_t> ids) const override;
  std::vector<TokenizerFile> files() const override;

 private:
  struct Source;
  struct Scratch;
  class BorrowedScratch;

  explicit HfTokenizer(Source&& source);
  void choose_bos_and_eos(const Source& source);
  std::vector<std::int32_t> encode_text(std::string_view text, bool special_is_text) const;

  std::string file_;                        // tokenizer.json
  std::optional<std::string> config_file_;  // tokenizer_config.json, if there is one
  AddedTokens added_tokens_;
  PreTokenizer pre_tokenizer_;
  Bpe bpe_;
  // Words that are special tokens of the vocabulary: with ignore_merges, encode_with_special gives the token.
  std::unordered_map<std::string, std::int32_t> special_words_;
  std::string token_bytes_;               // of all tokens, one behind the other
  std::vector<std::size_t> token_begin_;  // by id, and the end; a special token has no bytes
  std::vector<bool> has_token_;           // by id
  std::int32_t bos_id_ = -1;
  std::int32_t eos_id_ = -1;
  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<Scratch>> free_scratch_;  // guarded by mutex_
};

}  // namespace tessera::data
