#include "data/tokenizer.h"

#include "base/error.h"
#include "base/file.h"
#include "data/byte_tokenizer.h"
#include "data/dataset.h"
#include "data/sentencepiece_tokenizer.h"

namespace tessera::data {

std::uint64_t Tokenizer::checksum() const {
  Checksum sum;
  sum.update(std::as_bytes(std::span(kind())));
  sum.update(std::as_bytes(std::span(model())));
  return sum.value();
}

std::unique_ptr<Tokenizer> load_tokenizer(const std::string& name) {
  namespace fs = std::filesystem;
  if (name == "bytes") return std::make_unique<ByteTokenizer>();
  const fs::path path(name);
  if (fs::is_directory(path)) {
    if (fs::exists(path / kTokenizerModelName)) {
      return std::make_unique<SentencePieceTokenizer>(path / kTokenizerModelName);
    }
    if (fs::exists(path / kManifestName) && read_manifest(path).tokenizer_kind == "bytes") {
      return std::make_unique<ByteTokenizer>();
    }
    fail(
        "tokenizer '{}': expected 'bytes', a SentencePiece model file, or a folder with {}; the folder has "
        "none",
        name, kTokenizerModelName);
  }
  require(fs::exists(path),
          "tokenizer '{}': expected 'bytes', a SentencePiece model file, or a folder with {}; "
          "there is no such file",
          name, kTokenizerModelName);
  return std::make_unique<SentencePieceTokenizer>(path);
}

}  // namespace tessera::data
