// Opens the tokenizer that a configuration names.
#pragma once

#include <memory>
#include <string>

#include "data/tokenizers/tokenizer.h"

namespace tessera::data {

/// Loads a tokenizer. `name` is "bytes", a SentencePiece model file, a tokenizer.json (any name that ends in .json) or
/// a folder. The folder has a tokenizer.json or else a tokenizer.model, or it is a dataset of bytes.
std::unique_ptr<Tokenizer> load_tokenizer(const std::string& name);

}  // namespace tessera::data
