// Opens a tokenizer by what a configuration names it.
#pragma once

#include <memory>
#include <string>

#include "data/tokenizers/tokenizer.h"

namespace tessera::data {

/// `name` is "bytes", a SentencePiece model file, a tokenizer.json (any name that ends in .json), or a folder: one with
/// a tokenizer.json or else a tokenizer.model, or a dataset of bytes.
std::unique_ptr<Tokenizer> load_tokenizer(const std::string& name);

}  // namespace tessera::data
