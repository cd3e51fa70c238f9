#include "data/tokenizers/tokenizer.h"

#include "base/file.h"

namespace tessera::data {

std::uint64_t Tokenizer::checksum() const {
  Checksum sum;
  sum.update(std::as_bytes(std::span(kind())));
  for (const TokenizerFile& file : files()) sum.update(std::as_bytes(std::span(file.content)));
  return sum.value();
}

bool is_tokenizer_file(const std::filesystem::path& name) {
  return name == kTokenizerModelName || name == kTokenizerJsonName || name == kTokenizerConfigName;
}

}  // namespace tessera::data
