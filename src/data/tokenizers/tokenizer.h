// Tokenizers: text to token ids and back.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::data {

/// A file that a tokenizer is made of, and what a folder calls it.
struct TokenizerFile {
  std::string_view name;
  std::string_view content;  // byte for byte; lives as long as the tokenizer
};

/// Ids are in [0, vocab_size()). All members may be called from many threads at once.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  /// "bytes", "sentencepiece" or "huggingface".
  virtual std::string_view kind() const = 0;
  virtual std::int32_t vocab_size() const = 0;
  /// Begins and ends every document; encode never gives them.
  virtual std::int32_t bos_id() const = 0;
  virtual std::int32_t eos_id() const = 0;

  /// decode(encode(text)) == text for UTF-8 text, unless a tokenizer was made to change it (hf_tokenizer.h).
  virtual std::vector<std::int32_t> encode(std::string_view text) const = 0;
  /// BOS, EOS and other control tokens give no text. An id outside the vocabulary is an Error. The result is
  /// not always UTF-8: a model may give the bytes of half a character.
  virtual std::string decode(std::span<const std::int32_t> ids) const = 0;

  /// What a dataset keeps a copy of; none if the tokenizer needs none.
  virtual std::vector<TokenizerFile> files() const = 0;
  /// Returns a checksum of the kind and the files. Tokenizers with the same checksum give the same ids.
  std::uint64_t checksum() const;
};

/// What a folder calls the files of its tokenizer: a SentencePiece model, or those of a Hugging Face tokenizer.
inline constexpr std::string_view kTokenizerModelName = "tokenizer.model";
inline constexpr std::string_view kTokenizerJsonName = "tokenizer.json";
inline constexpr std::string_view kTokenizerConfigName = "tokenizer_config.json";

/// True for the three names above.
bool is_tokenizer_file(const std::filesystem::path& name);

}  // namespace tessera::data
