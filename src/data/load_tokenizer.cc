#include "data/load_tokenizer.h"

#include "base/error.h"
#include "base/file.h"
#include "data/dataset.h"
#include "data/tokenizers/byte_tokenizer.h"
#include "data/tokenizers/hf_tokenizer.h"
#include "data/tokenizers/sentencepiece_tokenizer.h"

namespace tessera::data {

std::unique_ptr<Tokenizer> load_tokenizer(const std::string& name) {
  namespace fs = std::filesystem;
  if (name == "bytes") return std::make_unique<ByteTokenizer>();
  const std::string expected =
      fmt::format("expected 'bytes', a SentencePiece model file, a {}, or a folder with {} or {}", kTokenizerJsonName,
                  kTokenizerJsonName, kTokenizerModelName);
  const fs::path path(name);
  const bool is_there = path_exists(path);
  if (is_there && fs::is_directory(path)) {
    // A folder with both files is that of a Hugging Face model. Its other file may be of a kind that shares only the
    // name.
    if (path_exists(path / kTokenizerJsonName)) return std::make_unique<HfTokenizer>(path / kTokenizerJsonName);
    if (path_exists(path / kTokenizerModelName)) {
      return std::make_unique<SentencePieceTokenizer>(path / kTokenizerModelName);
    }
    if (path_exists(path / kManifestName) && read_manifest(path).tokenizer_kind == "bytes") {
      return std::make_unique<ByteTokenizer>();
    }
    fail("tokenizer '{}': {}; the folder has none", name, expected);
  }
  require(is_there, "tokenizer '{}': {}; there is no such file", name, expected);
  if (path.extension() == ".json") return std::make_unique<HfTokenizer>(path);
  return std::make_unique<SentencePieceTokenizer>(path);
}

}  // namespace tessera::data
