// Preparation: documents to a dataset (dataset.h).
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "data/dataset.h"
#include "data/document_source.h"

namespace tessera::data {

struct PrepareProgress {
  std::uint64_t num_bytes_done = 0;  // of the input files, as they are on the disk
  std::uint64_t num_bytes_total = 0;
  std::uint64_t num_documents = 0;
  std::uint64_t num_tokens = 0;
};

struct PrepareOptions {
  std::vector<std::filesystem::path> inputs;
  std::string tokenizer;         // for load_tokenizer
  std::filesystem::path output;  // folder
  double val_fraction = 0.01;    // of the documents, in [0, 1)
  std::uint64_t shard_tokens = 100'000'000;
  std::uint64_t seed = 0;  // of the choice of validation documents
  bool overwrite = false;
  std::function<void(const PrepareProgress&)> on_progress;  // from the calling thread, now and then
};

struct PrepareResult {
  Manifest manifest;
  SourceStatistics source;
};

/// Writes the dataset to "OUTPUT.tmp" and renames that to `output` when it is whole; on an Error, nothing is
/// left.
///
/// Document i (of those with text, counted from 0) belongs to "val" if Philox(seed,
/// "data.prepare.val").uniform(i) is less than val_fraction, else to "train". Shards are filled in the order
/// of the documents; a shard ends before the document that would take it beyond `shard_tokens`, but has one
/// at least. The result does not depend on the number of threads. Memory: some 10 MB of text and its tokens,
/// and the largest document.
///
/// Error: `output` exists (with `overwrite`, only if it holds anything but a dataset); no document is left
/// for "train".
PrepareResult prepare_dataset(const PrepareOptions& options);

}  // namespace tessera::data
