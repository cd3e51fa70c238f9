#include "data/tokenizers/byte_tokenizer.h"

#include "base/error.h"

namespace tessera::data {

std::vector<std::int32_t> ByteTokenizer::encode(std::string_view text) const {
  std::vector<std::int32_t> ids;
  ids.reserve(text.size());
  for (const char c : text) ids.push_back(static_cast<std::uint8_t>(c));
  return ids;
}

std::string ByteTokenizer::decode(std::span<const std::int32_t> ids) const {
  std::string text;
  text.reserve(ids.size());
  for (const std::int32_t id : ids) {
    require(id >= 0 && id < vocab_size(), "token id {} is outside the byte tokenizer's vocabulary [0, {})", id,
            vocab_size());
    if (id < 256) text.push_back(static_cast<char>(static_cast<std::uint8_t>(id)));
  }
  return text;
}

}  // namespace tessera::data
