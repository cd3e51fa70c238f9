// A dataset: a folder of token shards with a copy of the tokenizer's files and a manifest, which is written last.
//
//   dataset.json        the manifest
//   tokenizer.model     or tokenizer.json (and tokenizer_config.json); absent for the byte tokenizer
//   train-00000.tokens, train-00001.tokens, ...
//   val-00000.tokens, ...
//
// Names in the manifest are relative to the folder, so the folder can be moved. The manifest has every file's checksum.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "data/shard.h"

namespace tessera::data {

inline constexpr std::string_view kManifestName = "dataset.json";
inline constexpr std::string_view kShardExtension = ".tokens";

struct ShardEntry {
  std::string file;
  std::uint64_t num_bytes = 0;
  std::uint64_t num_tokens = 0;
  std::uint64_t num_documents = 0;
  std::uint64_t checksum = 0;  // the shard's header_checksum, which covers the whole file
};

struct Manifest {
  std::string tokenizer_kind;            // "bytes", "sentencepiece" or "huggingface"
  std::uint64_t tokenizer_checksum = 0;  // Tokenizer::checksum
  std::int32_t vocab_size = 0;
  std::int32_t bos_id = 0;
  std::int32_t eos_id = 0;
  double val_fraction = 0;  // with `seed`, it says how the documents were split
  std::uint64_t seed = 0;
  std::map<std::string, std::vector<ShardEntry>> splits;  // "train", and "val" if it has documents
};

std::uint64_t num_tokens(const std::vector<ShardEntry>& shards);
std::uint64_t num_documents(const std::vector<ShardEntry>& shards);

/// Returns a checksum that identifies the tokens of a split. It covers the checksums of the tokenizer and of all
/// shards, in order.
std::uint64_t split_checksum(const Manifest& manifest, const std::string& split);

/// Calls `read`, which reads a dataset. If it throws Error, the message then begins with `key`, the configuration's key
/// that names the dataset.
template <typename Read>
auto read_for_key(const char* key, Read&& read) {
  try {
    return read();
  } catch (const Error& error) {
    fail("{}: {}", key, error.what());
  }
}

/// Reads the manifest in `folder`. Throws Error, which names the file and the field, if it is missing or damaged.
Manifest read_manifest(const std::filesystem::path& folder);
void write_manifest(const std::filesystem::path& folder, const Manifest& manifest);

/// Opens all shards of a split. Throws Error if there is no such split, or if a shard is not the one that the manifest
/// lists.
std::vector<Shard> open_split(const std::filesystem::path& folder, const Manifest& manifest, const std::string& split);

/// Loads the tokenizer from the dataset's folder. Throws Error if it is not the one that the manifest names.
std::unique_ptr<Tokenizer> load_dataset_tokenizer(const std::filesystem::path& folder, const Manifest& manifest);

}  // namespace tessera::data
