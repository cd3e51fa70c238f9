// Uses SentencePiece models (Kudo and Richardson, "SentencePiece", EMNLP 2018) through their own library.
//
// Models that train_sentencepiece makes lose nothing: characters without a piece become byte pieces, text is not
// normalized, and spaces and line ends are kept. Models from elsewhere do what they were made for.
#pragma once

#include <memory>

#include "data/tokenizers/tokenizer.h"

namespace sentencepiece {
class SentencePieceProcessor;
}

namespace tessera::data {

class SentencePieceTokenizer final : public Tokenizer {
 public:
  /// Throws Error if the file is not a SentencePiece model with BOS and EOS.
  explicit SentencePieceTokenizer(const std::filesystem::path& path);
  ~SentencePieceTokenizer() override;

  std::string_view kind() const override { return "sentencepiece"; }
  std::int32_t vocab_size() const override { return vocab_size_; }
  std::int32_t bos_id() const override { return bos_id_; }
  std::int32_t eos_id() const override { return eos_id_; }
  /// Encodes `text`. Ill-formed UTF-8 becomes U+FFFD.
  std::vector<std::int32_t> encode(std::string_view text) const override;
  std::string decode(std::span<const std::int32_t> ids) const override;
  std::vector<TokenizerFile> files() const override { return {{.name = kTokenizerModelName, .content = model_}}; }

 private:
  void encode_piece(std::string_view text, std::vector<std::int32_t>& ids) const;

  std::string place_;  // "tokenizer 'PATH'", for errors
  std::string model_;
  std::unique_ptr<sentencepiece::SentencePieceProcessor> processor_;
  std::int32_t vocab_size_ = 0;
  std::int32_t bos_id_ = 0;
  std::int32_t eos_id_ = 0;
  bool adds_prefix_ = false;             // the model puts a space in front of a text
  bool needs_whole_text_ = false;        // the ids of a text are not those of its pieces, one after the other
  std::vector<std::int32_t> block_ids_;  // the ids that stand for U+2581 itself; empty if there are none
};

}  // namespace tessera::data
