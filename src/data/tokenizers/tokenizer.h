// Tokenizers turn text into token ids and back.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::data {

/// Describes a file that a tokenizer consists of, and its name in a folder.
struct TokenizerFile {
  std::string_view name;
  std::string_view content;  // byte for byte; lives as long as the tokenizer
};

/// Turns text into ids in [0, vocab_size()), and back. Several threads may call its members at once.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  /// Returns "bytes", "sentencepiece" or "huggingface".
  virtual std::string_view kind() const = 0;
  virtual std::int32_t vocab_size() const = 0;
  /// Returns the id that begins every document. encode never gives it.
  virtual std::int32_t bos_id() const = 0;
  /// Returns the id that ends every document. encode never gives it.
  virtual std::int32_t eos_id() const = 0;

  /// Encodes a text. decode(encode(text)) == text for UTF-8 text, unless a tokenizer is made to change it
  /// (hf_tokenizer.h).
  virtual std::vector<std::int32_t> encode(std::string_view text) const = 0;
  /// Decodes ids. BOS, EOS and other control tokens give no text. Throws Error for an id outside the vocabulary. The
  /// result is not always UTF-8: a model may produce the bytes of half a character.
  virtual std::string decode(std::span<const std::int32_t> ids) const = 0;

  /// Returns the files that a dataset keeps a copy of. There are none if the tokenizer needs none.
  virtual std::vector<TokenizerFile> files() const = 0;
  /// Returns a checksum of the kind and the files. Tokenizers with the same checksum give the same ids.
  std::uint64_t checksum() const;
};

/// The names of a tokenizer's files in a folder: a SentencePiece model, or the files of a Hugging Face tokenizer.
inline constexpr std::string_view kTokenizerModelName = "tokenizer.model";
inline constexpr std::string_view kTokenizerJsonName = "tokenizer.json";
inline constexpr std::string_view kTokenizerConfigName = "tokenizer_config.json";

/// Returns whether `name` is one of the three names above.
bool is_tokenizer_file(const std::filesystem::path& name);

}  // namespace tessera::data
