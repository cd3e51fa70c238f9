// Trains SentencePiece models: byte-pair encoding (Sennrich et al., ACL 2016) on a sample of the documents.
#pragma once

#include <cstdint>
#include <string>

#include "data/document_source.h"

namespace tessera::data {

struct SentencePieceOptions {
  std::int32_t vocab_size = 2048;  // includes 3 control pieces and 256 byte pieces; more than 259
  std::uint64_t sample_bytes = 8u << 20;
  std::uint64_t seed = 0;  // for drawing the sample
};

/// Reads all documents and returns the bytes of a model file. Ids are: 0 unknown (never used), 1 BOS, 2 EOS, 3 to 258
/// the bytes 0 to 255, then pieces. Pieces do not cross spaces. Each digit is a piece of its own. A run of spaces may
/// be a piece.
///
/// The result is deterministic. The sample is drawn without replacement from pieces of documents of about 4 KiB, which
/// are all equally likely. It has `sample_bytes`. Shorter texts are used whole. Training takes memory of about that
/// size.
///
/// Throws Error if `vocab_size` is too small for the characters of the text or too large for the amount of text.
std::string train_sentencepiece(DocumentSource& source, const SentencePieceOptions& options);

}  // namespace tessera::data
