// The tokenizer with one token per byte. Ids 0 to 255 are the bytes, 256 is BOS, 257 is EOS. It needs no training and
// loses nothing.
#pragma once

#include "data/tokenizers/tokenizer.h"

namespace tessera::data {

class ByteTokenizer final : public Tokenizer {
 public:
  std::string_view kind() const override { return "bytes"; }
  std::int32_t vocab_size() const override { return 258; }
  std::int32_t bos_id() const override { return 256; }
  std::int32_t eos_id() const override { return 257; }
  std::vector<std::int32_t> encode(std::string_view text) const override;
  std::string decode(std::span<const std::int32_t> ids) const override;
  std::vector<TokenizerFile> files() const override { return {}; }
};

}  // namespace tessera::data
