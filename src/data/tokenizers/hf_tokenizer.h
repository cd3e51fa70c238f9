// Tokenizers from Hugging Face's tokenizer.json: byte-level BPE (tokenizer_json.h says what is accepted).
//
// They give the same ids as the `tokenizers` library, but for two rare cases that docs/data.md describes. If a text
// contains the text of a control token, there are two ways to encode it:
// - `encode` treats the text of a special token as plain text. The library does so with encode_special_tokens = true,
//   but here this also holds under ignore_merges. So no document can end itself by its content. Added tokens that the
//   file does not mark as special are found. DeepSeek-V3's <｜User｜> is one.
// - `encode_with_special` finds special tokens, too, like the library's encode(text, add_special_tokens=False).
// Neither adds BOS or EOS. Truncation and padding, which a file may ask for, are not done.
//
// Decoding restores a text exactly, except for `add_prefix_space`, `lstrip`, `rstrip`, the behaviour Removed, and bytes
// without a token. decode returns exactly the bytes that the tokens stand for. The library instead puts U+FFFD for
// ill-formed UTF-8.
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
  /// Reads `path` and, if it exists beside it, tokenizer_config.json. BOS and EOS are those of tokenizer_config.json.
  /// If it says that there is no BOS, EOS stands in for it. A name that the vocabulary lacks gets the next id. Throws
  /// Error if transformers gives it another one.
  /// Otherwise BOS and EOS are those that the post-processor adds, or else well-known names. It warns if bytes have no
  /// token: encoding a text drops them.
  explicit HfTokenizer(const std::filesystem::path& path);
  ~HfTokenizer() override;

  std::string_view kind() const override { return "huggingface"; }
  /// Returns the largest id + 1. Some ids may have no token.
  std::int32_t vocab_size() const override { return static_cast<std::int32_t>(token_begin_.size()) - 1; }
  std::int32_t bos_id() const override { return bos_id_; }
  std::int32_t eos_id() const override { return eos_id_; }
  /// Encodes `text`. Ill-formed UTF-8 becomes U+FFFD.
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
  // The words that are special tokens of the vocabulary. With ignore_merges, encode_with_special gives such a word its
  // token.
  std::unordered_map<std::string, std::int32_t> special_words_;
  std::string token_bytes_;               // the bytes of all tokens, one after the other
  std::vector<std::size_t> token_begin_;  // by id, and the end of the last; a special token has no bytes
  std::vector<bool> has_token_;           // by id
  std::int32_t bos_id_ = -1;
  std::int32_t eos_id_ = -1;
  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<Scratch>> free_scratch_;  // guarded by mutex_
};

}  // namespace tessera::data
