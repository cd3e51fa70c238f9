// The loader reads sequences of tokens for training. Their order depends only on (dataset, seed, seq_len).
//
// Samples: the loader cuts the tokens of a split's shards, one shard after the other, into pieces of seq_len + 1 tokens
// without overlap. Each document is BOS, tokens, EOS. The rest at the end is dropped. There are N samples. In each,
// tokens [0, seq_len) are the inputs and [1, seq_len + 1) the targets.
//
// Order: epoch e visits the samples in the order of a seeded permutation of [0, N), a different one for each e. Without
// shuffle it visits them in ascending order.
//
// Position: the number n of samples that all data ranks together have consumed since the start. Its epoch is n / N. A
// call of `next` on rank r reads the samples at n + r * B ... n + (r + 1) * B - 1 (B = the sequences of a micro-batch)
// and increases n by dp_size * B. So ranks never overlap, and the end of an epoch flows into the next. There is no
// other state, and neither B nor dp_size is part of it. A run can therefore resume on another number of ranks and
// continue where it was.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <vector>

#include "data/dataset.h"

namespace tessera::data {

struct LoaderConfig {
  std::filesystem::path dataset;  // folder
  std::string split = "train";    // or "val"
  std::int64_t seq_len = 0;
  std::int64_t local_batch_size = 0;
  std::int64_t dp_rank = 0;
  std::int64_t dp_size = 1;
  std::uint64_t seed = 0;
  std::int64_t vocab_size = 0;  // of the model; all token ids must be less
  bool shuffle = true;
};

/// Holds the loader's state in a checkpoint: the position, and what it is a position in. It is the same on all ranks.
struct LoaderState {
  std::uint64_t position = 0;          // n
  std::uint64_t dataset_checksum = 0;  // split_checksum
  std::uint64_t seed = 0;
  std::int64_t seq_len = 0;
  bool shuffle = true;

  bool operator==(const LoaderState&) const = default;
};

void to_json(nlohmann::json& json, const LoaderState& state);
/// Throws Error if a field is missing or has another type.
void from_json(const nlohmann::json& json, LoaderState& state);

class Loader {
 public:
  /// Throws Error if the dataset is damaged, has fewer than seq_len + 1 tokens, or has a token id >= vocab_size.
  explicit Loader(const LoaderConfig& config);

  /// Writes this rank's next samples to `tokens`, [local_batch_size, seq_len + 1]. It allocates nothing. Throws Error,
  /// which names the shard and the place, if a block turns out to be damaged, or an id is not below vocab_size.
  void next(std::span<std::int32_t> tokens);

  /// Returns N, the number of samples.
  std::uint64_t num_samples() const { return num_samples_; }
  std::uint64_t position() const { return position_; }
  const Manifest& manifest() const { return manifest_; }
  const std::filesystem::path& dataset() const { return config_.dataset; }

  /// Moves to a position, e.g. back to 0 before each validation.
  void seek(std::uint64_t position) { position_ = position; }

  LoaderState state() const;
  /// Moves to the position of `state`. Throws Error if it is a position in another dataset, or in another order of it.
  void restore(const LoaderState& state);

 private:
  /// Returns the sample at a position.
  std::uint64_t sample_at(std::uint64_t position) const;
  void read_sample(std::uint64_t sample, std::span<std::int32_t> tokens) const;
  [[noreturn]] void fail_bad_id(const Shard& shard, std::uint64_t token, std::int64_t id) const;

  LoaderConfig config_;
  Manifest manifest_;
  std::vector<Shard> shards_;
  std::vector<std::uint64_t> shard_ends_;  // where each shard ends in the joined tokens
  std::uint64_t dataset_checksum_ = 0;
  std::uint64_t num_samples_ = 0;
  std::uint64_t position_ = 0;
};

}  // namespace tessera::data
