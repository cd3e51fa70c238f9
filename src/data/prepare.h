// Makes a dataset (dataset.h) of documents.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "data/dataset.h"
#include "data/document_source.h"

namespace tessera::data {

struct PrepareOptions {
  std::vector<std::filesystem::path> inputs;
  std::string tokenizer;         // as load_tokenizer takes it
  std::filesystem::path output;  // folder
  double val_fraction = 0.01;    // of the documents, in [0, 1)
  std::uint64_t shard_tokens = 1'000'000'000;
  std::size_t max_shards = 30'000;  // of a split: a run maps those of both, and Linux allows a process 65,530 maps
  std::uint64_t seed = 0;           // for the choice of validation documents
  bool overwrite = false;
  bool skip_unknown = false;  // leaves out files that are not text, instead of an Error
};

struct PrepareResult {
  Manifest manifest;
  SourceStatistics source;
  std::uint64_t num_without_tokens = 0;  // documents that were left out because their text gives no token
};

/// Writes the dataset to "OUTPUT.tmp" and renames that to `output` when it is complete. After an Error, or Stopped (a
/// signal), nothing is left. It shows progress (progress_bar.h).
///
/// Document i (of those with tokens, counted from 0) belongs to "val" if Philox(seed, "data.prepare.val").uniform(i) is
/// less than val_fraction, else to "train". Shards are filled in the order of the documents. A shard ends before the
/// document that would take it beyond `shard_tokens`, but it has at least one document. The result does not depend on
/// the number of threads. Memory holds some 10 MB of text and its tokens, the largest document, and 8 bytes
/// per document of the shards that are open.
///
/// Throws Error if
/// - `output` exists (with `overwrite`: and holds anything but a dataset), lies within a folder of `inputs`,
///   or is being written by another process;
/// - a file is not text, no document is left for "train", or a split needs more than `max_shards` shards.
PrepareResult prepare_dataset(const PrepareOptions& options);

}  // namespace tessera::data
