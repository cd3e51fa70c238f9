#include "data/loader.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "support.h"

namespace tessera::data {
namespace {

namespace fs = std::filesystem;
using Tokens = std::vector<std::int32_t>;

constexpr std::int64_t kSeqLen = 15;
constexpr std::size_t kSampleSize = kSeqLen + 1;

const Tokens kGoldenEpoch0{257, 256, 'd', 'e', 256, 'a', 'b', 'c', 256, 'i', 'j', 257, 'f', 'g', 'h', 257};
const Tokens kGoldenEpoch1{257, 256, 'd', 'e', 'f', 'g', 'h', 257, 256, 'i', 'j', 257, 256, 'a', 'b', 'c'};

LoaderConfig config_for(const fs::path& dataset) {
  LoaderConfig config;
  config.dataset = dataset;
  config.seq_len = kSeqLen;
  config.local_batch_size = 3;
  config.seed = 42;
  config.vocab_size = 258;
  return config;
}

/// Returns the samples of `num_calls` calls on all ranks, in the order of positions.
std::vector<Tokens> samples_of(std::vector<Loader>& ranks, std::int64_t batch, int num_calls) {
  std::vector<Tokens> samples;
  Tokens tokens(static_cast<std::size_t>(batch) * kSampleSize);
  for (int call = 0; call < num_calls; ++call) {
    for (Loader& loader : ranks) {
      loader.next(tokens);
      for (auto at = tokens.begin(); at != tokens.end(); at += kSampleSize) samples.emplace_back(at, at + kSampleSize);
    }
  }
  return samples;
}

std::vector<Loader> make_ranks(LoaderConfig config, std::int64_t dp_size) {
  std::vector<Loader> ranks;
  config.dp_size = dp_size;
  for (config.dp_rank = 0; config.dp_rank < dp_size; ++config.dp_rank) ranks.emplace_back(config);
  return ranks;
}

/// Returns the samples that a loader must give, read from the shards.
std::vector<Tokens> expected_samples(const fs::path& dataset) {
  const Tokens all = all_tokens(dataset, "train");
  std::vector<Tokens> samples;
  for (std::size_t at = 0; at + kSampleSize <= all.size(); at += kSampleSize) {
    samples.emplace_back(all.begin() + static_cast<std::ptrdiff_t>(at),
                         all.begin() + static_cast<std::ptrdiff_t>(at + kSampleSize));
  }
  return samples;
}

std::vector<Tokens> sorted(std::vector<Tokens> samples) {
  std::sort(samples.begin(), samples.end());
  return samples;
}

TEST(Loader, WithoutShuffleGivesThePackedTokens) {
  const TemporaryFolder scratch;
  const fs::path dataset = make_dataset(scratch, 100, 177);  // shards end within samples
  ASSERT_GT(read_manifest(dataset).splits.at("train").size(), 10u);
  LoaderConfig config = config_for(dataset);
  config.shuffle = false;
  std::vector<Loader> ranks = make_ranks(config, 1);
  std::vector<Tokens> expected = expected_samples(dataset);
  EXPECT_EQ(ranks[0].num_samples(), expected.size());
  const int num_calls = static_cast<int>(expected.size() / 3);
  expected.resize(static_cast<std::size_t>(num_calls) * 3);
  EXPECT_EQ(samples_of(ranks, 3, num_calls), expected);
}

TEST(Loader, Golden) {
  const TemporaryFolder scratch;
  PrepareOptions options;
  options.inputs = {
      write_file(scratch / "in.jsonl", "{\"text\": \"abc\"}\n{\"text\": \"defgh\"}\n{\"text\": \"ij\"}\n")};
  options.tokenizer = "bytes";
  options.output = scratch / "dataset";
  options.val_fraction = 0;
  prepare_dataset(options);
  LoaderConfig config = config_for(options.output);
  config.seq_len = 3;
  config.local_batch_size = 4;
  Loader loader(config);
  ASSERT_EQ(loader.num_samples(), 4u);  // each of 4 tokens: ^abc $^de fgh$ ^ij$
  Tokens tokens(16);
  loader.next(tokens);
  EXPECT_EQ(tokens, kGoldenEpoch0);
  loader.next(tokens);
  EXPECT_EQ(tokens, kGoldenEpoch1);
}

TEST(Loader, AnEpochHasEverySampleOnce) {
  const TemporaryFolder scratch;
  const fs::path dataset = make_dataset(scratch, 96, 300);
  const std::vector<Tokens> expected = expected_samples(dataset);
  const std::size_t num_samples = expected.size();
  ASSERT_EQ(std::adjacent_find(expected.begin(), expected.end()), expected.end());
  for (const std::int64_t dp_size : {1, 2, 4}) {
    LoaderConfig config = config_for(dataset);
    config.local_batch_size = 3;
    std::vector<Loader> ranks = make_ranks(config, dp_size);
    // The calls cover more than three epochs. The ends of epochs do not fall on the ends of calls.
    const int num_calls = static_cast<int>(3 * num_samples / static_cast<std::size_t>(3 * dp_size)) + 1;
    const std::vector<Tokens> samples = samples_of(ranks, 3, num_calls);
    ASSERT_GE(samples.size(), 3 * num_samples);
    std::vector<std::vector<Tokens>> epochs;
    for (std::size_t epoch = 0; epoch < 3; ++epoch) {
      const auto begin = samples.begin() + static_cast<std::ptrdiff_t>(epoch * num_samples);
      epochs.emplace_back(begin, begin + static_cast<std::ptrdiff_t>(num_samples));
      EXPECT_EQ(sorted(epochs.back()), sorted(expected)) << "dp_size " << dp_size << ", epoch " << epoch;
      EXPECT_NE(epochs.back(), expected);
    }
    EXPECT_NE(epochs[0], epochs[1]);
    EXPECT_EQ(ranks[0].position() / num_samples, 3u);
  }
}

TEST(Loader, OrderDoesNotDependOnRanksOrBatch) {
  const TemporaryFolder scratch;
  const fs::path dataset = make_dataset(scratch, 60, 300);
  LoaderConfig config = config_for(dataset);
  config.local_batch_size = 12;
  std::vector<Loader> one = make_ranks(config, 1);
  const std::vector<Tokens> expected = samples_of(one, 12, 20);
  config.local_batch_size = 3;
  std::vector<Loader> four = make_ranks(config, 4);
  EXPECT_EQ(samples_of(four, 3, 20), expected);
  config.local_batch_size = 2;
  std::vector<Loader> three = make_ranks(config, 3);
  EXPECT_EQ(samples_of(three, 2, 40), expected);
  config.seed = 43;
  config.local_batch_size = 12;
  std::vector<Loader> other_seed = make_ranks(config, 1);
  EXPECT_NE(samples_of(other_seed, 12, 20), expected);
}

TEST(Loader, ResumesWhereItWas) {
  const TemporaryFolder scratch;
  const fs::path dataset = make_dataset(scratch, 60, 300);
  const LoaderConfig config = config_for(dataset);
  std::vector<Loader> straight = make_ranks(config, 4);
  const std::vector<Tokens> expected = samples_of(straight, 3, 30);
  std::vector<Loader> before = make_ranks(config, 4);
  std::vector<Tokens> samples = samples_of(before, 3, 11);
  EXPECT_EQ(before[0].state(), before[3].state());
  EXPECT_EQ(before[0].state().position, 132u);
  const std::string saved = nlohmann::json(before[0].state()).dump();

  // 2 ranks replace 4 ranks at the same batch size, so 38 calls of 6 samples replace 19 of 12.
  std::vector<Loader> after = make_ranks(config, 2);
  for (Loader& loader : after) loader.restore(nlohmann::json::parse(saved).get<LoaderState>());
  const std::vector<Tokens> rest = samples_of(after, 3, 38);
  samples.insert(samples.end(), rest.begin(), rest.end());
  EXPECT_EQ(samples, expected);
  after[0].seek(0);
  EXPECT_EQ(after[0].position(), 0u);
}

TEST(Loader, RefusesAStateOfAnotherRun) {
  const TemporaryFolder scratch;
  const fs::path dataset = make_dataset(scratch, 60, 300, 0.3);
  Loader loader(config_for(dataset));
  const LoaderState good = loader.state();
  EXPECT_NO_THROW(loader.restore(good));
  const auto expect_refused = [&](auto change, const std::vector<std::string>& parts) {
    LoaderState state = good;
    state.position = 7;
    change(state);
    expect_error([&] { loader.restore(state); }, parts);
    EXPECT_EQ(loader.position(), 0u);
  };
  expect_refused([](LoaderState& s) { s.dataset_checksum ^= 1; }, {"dataset", "checksum"});
  expect_refused([](LoaderState& s) { s.seq_len = 16; },
                 {"of 16 tokens", "training.seq_len is 15", "another job.dump_folder"});
  expect_refused([](LoaderState& s) { s.seed = 41; }, {"41", "42"});
  expect_refused([](LoaderState& s) { s.shuffle = false; }, {"shuffle"});
  LoaderConfig config = config_for(dataset);
  config.split = "val";
  EXPECT_NE(Loader(config).state().dataset_checksum, good.dataset_checksum);
}

TEST(LoaderState, JsonRoundTripAndErrors) {
  const LoaderState state{.position = ~std::uint64_t{0},
                          .dataset_checksum = 0xfedcba9876543210u,
                          .seed = ~std::uint64_t{0} - 1,
                          .seq_len = 4096,
                          .shuffle = false};
  const nlohmann::json json = state;
  EXPECT_EQ(nlohmann::json::parse(json.dump()).get<LoaderState>(), state);
  for (const char* field : {"position", "dataset_checksum", "seed", "seq_len", "shuffle"}) {
    nlohmann::json bad = json;
    bad.erase(field);
    expect_error([&] { bad.get<LoaderState>(); }, {"loader state", field});
    bad[field] = nlohmann::json::array();
    expect_error([&] { bad.get<LoaderState>(); }, {"loader state"});
  }
  nlohmann::json bad = json;
  bad["seed"] = "12x";
  expect_error([&] { bad.get<LoaderState>(); }, {"seed", "12x"});
}

TEST(Loader, ConfigsThatCannotWork) {
  const TemporaryFolder scratch;
  const fs::path dataset = make_dataset(scratch, 20, 1000);
  const auto expect_refused = [&](auto change, const std::vector<std::string>& parts) {
    LoaderConfig config = config_for(dataset);
    change(config);
    expect_error([&] { Loader loader(config); }, parts);
  };
  const std::size_t num_tokens = all_tokens(dataset, "train").size();
  expect_refused([&](LoaderConfig& c) { c.seq_len = static_cast<std::int64_t>(num_tokens); },
                 {fmt::format("{} tokens", num_tokens), fmt::format("{}", num_tokens + 1)});
  expect_refused([](LoaderConfig& c) { c.seq_len = 0; }, {"sequence length 0"});
  expect_refused([](LoaderConfig& c) { c.local_batch_size = 0; }, {"batch size 0"});
  expect_refused([](LoaderConfig& c) { c.dp_rank = 1; }, {"rank 1 of 1"});
  expect_refused([](LoaderConfig& c) { c.vocab_size = 0; }, {"vocabulary size 0"});
  expect_refused([](LoaderConfig& c) { c.split = "val"; }, {"'val'"});
  expect_refused([&](LoaderConfig& c) { c.dataset = scratch / "none"; }, {"none"});
  LoaderConfig config = config_for(dataset);
  config.seq_len = static_cast<std::int64_t>(num_tokens) - 1;
  EXPECT_EQ(Loader(config).num_samples(), 1u);
}

TEST(Loader, RefusesTokensOutsideOfTheVocabulary) {
  const TemporaryFolder scratch;
  const fs::path dataset = make_dataset(scratch, 20, 1'000'000);
  LoaderConfig config = config_for(dataset);
  config.vocab_size = 257;
  expect_error([&] { Loader loader(config); }, {"train-00000.tokens", "token id 257", "vocabulary size is 257"});

  // The shard's header lies, and the manifest agrees with it.
  const fs::path path = dataset / "train-00000.tokens";
  change_header(path, [](ShardHeader& h) { h.max_token_id = 256; });
  Manifest manifest = read_manifest(dataset);
  manifest.splits.at("train")[0].checksum = Shard(path).header().header_checksum;
  write_manifest(dataset, manifest);
  config.shuffle = false;
  Loader loader(config);
  Tokens tokens(3 * kSampleSize);
  // The first document is "0 ", followed by EOS.
  expect_error([&] { loader.next(tokens); }, {path.string(), "token 3 has id 257", "vocabulary size 257"});
  EXPECT_EQ(loader.position(), 0u);
}

TEST(Loader, DamageIsAnErrorWhenItIsTouched) {
  const TemporaryFolder scratch;
  const fs::path dataset = make_dataset(scratch, 20, 1'000'000);
  const fs::path path = dataset / "train-00000.tokens";
  std::string content = read_text_file(path);
  content[sizeof(ShardHeader) + 11] ^= 4;
  write_file(path, content);
  Loader loader(config_for(dataset));
  Tokens tokens(3 * kSampleSize);
  expect_error([&] { loader.next(tokens); }, {path.string(), "damaged"});
  write_file(path, content.substr(0, content.size() / 2));
  expect_error([&] { Loader again(config_for(dataset)); }, {path.string(), "cut short"});
  fs::remove(path);
  expect_error([&] { Loader again(config_for(dataset)); }, {path.string(), "missing"});
}

TEST(Loader, NextWantsARoomOfTheRightSize) {
  const TemporaryFolder scratch;
  Loader loader(config_for(make_dataset(scratch, 20, 1000)));
  Tokens tokens(3 * kSampleSize + 1);
  EXPECT_THROW(loader.next(tokens), InternalError);
}

}  // namespace
}  // namespace tessera::data
