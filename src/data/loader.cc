#include "data/loader.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/json.h"
#include "data/permutation.h"

namespace tessera::data {
namespace {

constexpr std::uint32_t kOrderStream = stream_of("data.loader.order");

}  // namespace

// The seed is stored as text, like the checksum, so that all of its 64 bits survive.
void to_json(nlohmann::json& json, const LoaderState& state) {
  json = {{"position", state.position},
          {"dataset_checksum", to_hex(state.dataset_checksum)},
          {"seed", fmt::format("{}", state.seed)},
          {"seq_len", state.seq_len},
          {"shuffle", state.shuffle}};
}

void from_json(const nlohmann::json& json, LoaderState& state) {
  try {
    const auto number = [&](const char* name, int base) {
      const std::string text = json.at(name).get<std::string>();
      std::size_t num_used = 0;
      const std::uint64_t value = std::stoull(text, &num_used, base);
      require(num_used == text.size(), "loader state: \"{}\": not a number: '{}'", name, text);
      return value;
    };
    json.at("position").get_to(state.position);
    state.dataset_checksum = number("dataset_checksum", 16);
    state.seed = number("seed", 10);
    json.at("seq_len").get_to(state.seq_len);
    json.at("shuffle").get_to(state.shuffle);
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {  // from the JSON library or from stoull
    fail("loader state: expected position, dataset_checksum, seed, seq_len and shuffle, got {}: {}", json.dump(),
         error.what());
  }
}

Loader::Loader(const LoaderConfig& config) : config_(config) {
  const std::string place = fmt::format("dataset '{}', split '{}'", config.dataset.string(), config.split);
  require(config.seq_len >= 1, "{}: sequence length {}, expected at least 1", place, config.seq_len);
  require(config.local_batch_size >= 1, "{}: local batch size {}, expected at least 1", place, config.local_batch_size);
  require(config.dp_size >= 1 && config.dp_rank >= 0 && config.dp_rank < config.dp_size,
          "{}: data rank {} of {}, expected a rank in [0, size)", place, config.dp_rank, config.dp_size);
  require(config.vocab_size >= 1, "{}: vocabulary size {}, expected at least 1", place, config.vocab_size);

  manifest_ = read_manifest(config.dataset);
  shards_ = open_split(config.dataset, manifest_, config.split);
  dataset_checksum_ = split_checksum(manifest_, config.split);
  std::uint64_t num_tokens = 0;
  for (const Shard& shard : shards_) {
    // The header knows this, so a model that is too small for the tokenizer is refused now and not in an hour.
    require(shard.header().max_token_id < config.vocab_size,
            "shard '{}': it has the token id {}, but the model's vocabulary size is {} (the tokenizer's is "
            "{}): expected a model.args.vocab_size that is at least as large",
            shard.path().string(), shard.header().max_token_id, config.vocab_size, shard.header().vocab_size);
    num_tokens += shard.num_tokens();
    shard_ends_.push_back(num_tokens);
  }
  num_samples_ = num_tokens / (static_cast<std::uint64_t>(config.seq_len) + 1);
  require(num_samples_ >= 1,
          "{}: {} tokens, fewer than one sample of seq_len + 1 = {}: use more text or a shorter sequence{}", place,
          num_tokens, config.seq_len + 1,
          config.split == "val" ? ", or a larger --val-fraction of `tessera data prepare`" : "");
}

std::uint64_t Loader::sample_at(std::uint64_t position) const {
  const std::uint64_t epoch = position / num_samples_;
  const std::uint64_t place = position % num_samples_;
  if (!config_.shuffle) return place;
  return Permutation(num_samples_, config_.seed, kOrderStream, static_cast<std::uint32_t>(epoch))(place);
}

void Loader::read_sample(std::uint64_t sample, std::span<std::int32_t> tokens) const {
  std::uint64_t first = sample * tokens.size();
  auto shard_idx =
      static_cast<std::size_t>(std::upper_bound(shard_ends_.begin(), shard_ends_.end(), first) - shard_ends_.begin());
  while (!tokens.empty()) {  // a sample may begin in one shard and end in another
    const Shard& shard = shards_[shard_idx];
    const std::uint64_t shard_begin = shard_ends_[shard_idx] - shard.num_tokens();
    const std::size_t count = std::min<std::uint64_t>(tokens.size(), shard_ends_[shard_idx] - first);
    const std::span<std::int32_t> part = tokens.first(count);
    shard.read_tokens(first - shard_begin, part);
    // The header says that there is no such id. A wrong id would be an access out of bounds on the device, so each is
    // checked.
    const auto bad = std::find_if(part.begin(), part.end(), [&](std::int32_t id) {
      return static_cast<std::uint32_t>(id) >= static_cast<std::uint64_t>(config_.vocab_size);
    });
    if (bad != part.end()) {
      fail_bad_id(shard, first - shard_begin + static_cast<std::uint64_t>(bad - part.begin()),
                  static_cast<std::uint32_t>(*bad));
    }
    tokens = tokens.subspan(count);
    first += count;
    ++shard_idx;
  }
}

void Loader::fail_bad_id(const Shard& shard, std::uint64_t token, std::int64_t id) const {
  fail(
      "shard '{}': token {} has id {}, expected less than the model's vocabulary size {} (the shard's header "
      "says that "
      "its largest id is {})",
      shard.path().string(), token, id, config_.vocab_size, shard.header().max_token_id);
}

void Loader::next(std::span<std::int32_t> tokens) {
  const auto batch = static_cast<std::uint64_t>(config_.local_batch_size);
  const std::size_t sample_size = static_cast<std::size_t>(config_.seq_len) + 1;
  TESSERA_CHECK(tokens.size() == batch * sample_size, "{} tokens for [{}, {}]", tokens.size(), batch, sample_size);
  const std::uint64_t first = position_ + static_cast<std::uint64_t>(config_.dp_rank) * batch;
  for (std::uint64_t i = 0; i < batch; ++i) {
    read_sample(sample_at(first + i), tokens.subspan(i * sample_size, sample_size));
  }
  position_ += static_cast<std::uint64_t>(config_.dp_size) * batch;
}

LoaderState Loader::state() const {
  return {.position = position_,
          .dataset_checksum = dataset_checksum_,
          .seed = config_.seed,
          .seq_len = config_.seq_len,
          .shuffle = config_.shuffle};
}

void Loader::restore(const LoaderState& state) {
  const LoaderState mine = this->state();
  const std::string place =
      fmt::format("cannot resume in dataset '{}', split '{}'", config_.dataset.string(), config_.split);
  require(state.dataset_checksum == mine.dataset_checksum,
          "{}: the saved position is in another dataset, with checksum {:016x}; this one has {:016x}", place,
          state.dataset_checksum, mine.dataset_checksum);
  require(
      state.seq_len == mine.seq_len,
      "{}: the saved position counts sequences of {} tokens, this run's training.seq_len is {}. Give that length to "
      "go on, or another job.dump_folder to start anew",
      place, state.seq_len, mine.seq_len);
  require(state.seed == mine.seed, "{}: the saved position is in the order of seed {}, this run's seed is {}", place,
          state.seed, mine.seed);
  require(state.shuffle == mine.shuffle, "{}: the saved run had shuffle {}, this one has {}", place, state.shuffle,
          mine.shuffle);
  position_ = state.position;
}

}  // namespace tessera::data
