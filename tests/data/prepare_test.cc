#include "data/prepare.h"

#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "data/load_tokenizer.h"
#include "support.h"
#include "tests/data/tokenizer_json_support.h"
#include "tests/threads_scope.h"

namespace tessera::data {
namespace {

namespace fs = std::filesystem;

std::map<std::string, std::string> contents_of(const fs::path& folder) {
  std::map<std::string, std::string> contents;
  for (const auto& entry : fs::directory_iterator(folder)) {
    contents[entry.path().filename().string()] = read_text_file(entry.path());
  }
  return contents;
}

PrepareOptions options_for(const TemporaryFolder& scratch, int num_documents = 200) {
  std::string lines;
  for (int i = 0; i < num_documents; ++i) lines += fmt::format("{{\"text\": \"document {}\"}}\n", i);
  PrepareOptions options;
  options.inputs = {write_file(scratch / "in.jsonl", lines)};
  options.tokenizer = "bytes";
  options.output = scratch / "out";
  options.val_fraction = 0.1;
  return options;
}

TEST(Prepare, EveryDocumentIsInOneSplitInOrder) {
  const TemporaryFolder scratch;
  PrepareOptions options = options_for(scratch);
  options.shard_tokens = 500;
  const PrepareResult result = prepare_dataset(options);
  const Manifest manifest = read_manifest(options.output);
  const auto tokenizer = load_dataset_tokenizer(options.output, manifest);
  EXPECT_EQ(result.source.num_documents, 200u);
  std::set<std::string> texts;
  for (const std::string split : {"train", "val"}) {
    int latest = -1;
    for (const Shard& shard : open_split(options.output, manifest, split)) {
      shard.verify();
      EXPECT_LE(shard.num_tokens(), 500u);
      for (std::uint64_t i = 0; i < shard.num_documents(); ++i) {
        const TokenRange range = shard.document(i);
        std::vector<std::int32_t> ids(range.end - range.begin);
        shard.read_tokens(range.begin, ids);
        EXPECT_EQ(ids.front(), tokenizer->bos_id());
        EXPECT_EQ(ids.back(), tokenizer->eos_id());
        const std::string text = tokenizer->decode(ids);
        EXPECT_TRUE(texts.insert(text).second) << text;
        const int number = std::stoi(text.substr(9));
        EXPECT_GT(number, latest);
        latest = number;
      }
    }
  }
  EXPECT_EQ(texts.size(), 200u);
  EXPECT_GT(manifest.splits.at("train").size(), 3u);
  // 20 of 200 are expected, with a standard deviation of 4.2.
  EXPECT_GT(num_documents(manifest.splits.at("val")), 5u);
  EXPECT_LT(num_documents(manifest.splits.at("val")), 40u);
}

/// Documents are read and tokenized 16384 at a time.
TEST(Prepare, MoreDocumentsThanAreReadAtATime) {
  const TemporaryFolder scratch;
  PrepareOptions options = options_for(scratch, 40'000);
  const PrepareResult result = prepare_dataset(options);
  const auto tokenizer = load_dataset_tokenizer(options.output, result.manifest);
  std::map<std::string, std::set<int>> numbers;
  std::size_t count = 0;
  for (const std::string split : {"train", "val"}) {
    for (const Shard& shard : open_split(options.output, result.manifest, split)) {
      for (std::uint64_t i = 0; i < shard.num_documents(); ++i, ++count) {
        const TokenRange range = shard.document(i);
        std::vector<std::int32_t> ids(range.end - range.begin);
        shard.read_tokens(range.begin, ids);
        numbers[split].insert(std::stoi(tokenizer->decode(ids).substr(9)));
      }
    }
  }
  EXPECT_EQ(count, 40'000u);
  EXPECT_EQ(numbers["train"].size() + numbers["val"].size(), count);
  EXPECT_NEAR(static_cast<double>(numbers["val"].size()), 4000, 300);  // deviation 60
  // Counts chosen documents for which the one 16384 later is chosen, too: 164 of about 1638 are expected, deviation 12.
  int again = 0;
  for (const int number : numbers["val"]) again += number < 16384 && numbers["val"].contains(number + 16384) ? 1 : 0;
  EXPECT_LT(again, 300);
}

TEST(Prepare, DoesNotDependOnTheNumberOfThreads) {
  const TemporaryFolder scratch;
  PrepareOptions options = options_for(scratch, 3000);
  options.shard_tokens = 5000;
  const ThreadsScope threads(1);
  prepare_dataset(options);
  const auto expected = contents_of(options.output);
  for (const int count : {2, 4}) {
    set_num_threads(count);
    options.output = scratch / fmt::format("out{}", count);
    prepare_dataset(options);
    EXPECT_EQ(contents_of(options.output), expected);
  }
}

TEST(Prepare, SeedChoosesTheValidationDocuments) {
  const TemporaryFolder scratch;
  PrepareOptions options = options_for(scratch);
  const Manifest first = prepare_dataset(options).manifest;
  options.seed = 1;
  options.overwrite = true;
  const Manifest second = prepare_dataset(options).manifest;
  EXPECT_NE(split_checksum(first, "val"), split_checksum(second, "val"));
  options.val_fraction = 0;
  EXPECT_FALSE(prepare_dataset(options).manifest.splits.contains("val"));
}

// A dataset of many documents is made again for a change of a few. The others must stay in their splits.
TEST(Prepare, TheRuleOfTheSplitIsPinned) {
  const TemporaryFolder scratch;
  PrepareOptions options = options_for(scratch);
  options.seed = 7;
  options.val_fraction = 0.3;
  const Philox random(options.seed, stream_of("data.prepare.val"));
  std::string lines;
  std::map<std::string, std::vector<std::int32_t>> expected;
  for (std::uint64_t i = 0; i < 50; ++i) {
    if (i == 20) lines += "{\"text\": \"\u00E9\"}\n";  // the tokenizer gives it no token, so it has no number
    lines += fmt::format("{{\"text\": \"{}\"}}\n", i);
    std::vector<std::int32_t>& tokens = expected[random.uniform(i) < options.val_fraction ? "val" : "train"];
    tokens.push_back(260);
    for (const char digit : std::to_string(i)) tokens.push_back(digit);
    tokens.push_back(261);
  }
  json file = small_tokenizer();
  for (const char* byte : {"\u00C3", "\u00A9"}) file["model"]["vocab"].erase(byte);  // these stand for themselves
  options.tokenizer = write_file(scratch / "tokenizer.json", file.dump());
  options.inputs = {write_file(scratch / "in.jsonl", lines)};
  EXPECT_EQ(prepare_dataset(options).num_without_tokens, 1u);
  for (const char* split : {"train", "val"}) EXPECT_EQ(all_tokens(options.output, split), expected[split]) << split;
  // The numbers themselves must not change either.
  EXPECT_EQ(num_documents(read_manifest(options.output).splits.at("val")), 20u);
}

TEST(Prepare, ADocumentLargerThanAShardHasOneOfItsOwn) {
  const TemporaryFolder scratch;
  PrepareOptions options;
  options.inputs = {write_file(scratch / "a.txt", "a"), write_file(scratch / "b.txt", std::string(100, 'b')),
                    write_file(scratch / "c.txt", "c")};
  options.tokenizer = "bytes";
  options.output = scratch / "out";
  options.val_fraction = 0;
  options.shard_tokens = 10;
  const Manifest manifest = prepare_dataset(options).manifest;
  ASSERT_EQ(manifest.splits.at("train").size(), 3u);
  EXPECT_EQ(manifest.splits.at("train")[1].num_tokens, 102u);
  options.overwrite = true;
  options.max_shards = 3;
  EXPECT_NO_THROW(prepare_dataset(options));
  options.max_shards = 2;
  expect_error([&] { prepare_dataset(options); }, {"more than 2 shards of 10 tokens (--shard-tokens)"});
}

TEST(Prepare, LeavesNothingAfterAnError) {
  const TemporaryFolder scratch;
  PrepareOptions options = options_for(scratch);
  options.shard_tokens = 100;
  options.inputs.push_back(write_file(scratch / "bad.jsonl", "{\"text\": \"good\"}\n{\"text\": 5}\n"));
  expect_error([&] { prepare_dataset(options); }, {"bad.jsonl:2"});
  EXPECT_FALSE(fs::exists(options.output));
  EXPECT_FALSE(fs::exists(scratch / "out.tmp"));
}

TEST(Prepare, AnErrorLeavesTheOldDataset) {
  const TemporaryFolder scratch;
  PrepareOptions options = options_for(scratch);
  prepare_dataset(options);
  const auto before = contents_of(options.output);
  expect_error([&] { prepare_dataset(options); }, {"out", "--force"});
  options.overwrite = true;
  options.inputs = {write_file(scratch / "bad.jsonl", "{\"text\": 5}\n")};
  expect_error([&] { prepare_dataset(options); }, {"bad.jsonl:1"});
  EXPECT_EQ(contents_of(options.output), before);
}

TEST(Prepare, ReplacesDatasetsOnly) {
  const TemporaryFolder scratch;
  PrepareOptions options = options_for(scratch);
  write_file(scratch / "out/precious.txt", "kept");
  expect_error([&] { prepare_dataset(options); }, {"out", "something"});
  options.overwrite = true;
  expect_error([&] { prepare_dataset(options); }, {"precious.txt", "not replaced"});
  EXPECT_EQ(read_text_file(scratch / "out/precious.txt"), "kept");
  write_file(scratch / "assets/tokenizer.json", "kept");  // datasets have a file of this name
  options.output = scratch / "assets";
  expect_error([&] { prepare_dataset(options); }, {"assets", "no dataset.json", "not replaced"});
  EXPECT_EQ(read_text_file(scratch / "assets/tokenizer.json"), "kept");
  options.output = write_file(scratch / "file", "kept");
  expect_error([&] { prepare_dataset(options); }, {"file", "expected a folder"});
  options.output = scratch / "new/deep/out/";
  EXPECT_NO_THROW(prepare_dataset(options));
  EXPECT_TRUE(fs::exists(scratch / "new/deep/out/dataset.json"));
}

TEST(Prepare, GoesOnAfterAKilledRun) {
  const TemporaryFolder scratch;
  PrepareOptions options = options_for(scratch);
  write_file(scratch / "out.tmp/train-00000.tokens", "half");
  write_file(scratch / "out.tmp/train-00001.tokens.123-4.tmp", "half");
  EXPECT_NO_THROW(prepare_dataset(options));
  EXPECT_FALSE(fs::exists(scratch / "out.tmp"));
  write_file(scratch / "out.tmp/precious.txt", "kept");
  options.overwrite = true;
  expect_error([&] { prepare_dataset(options); }, {"precious.txt", "in the way"});
}

TEST(Prepare, OptionsThatCannotWork) {
  const TemporaryFolder scratch;
  PrepareOptions options = options_for(scratch);
  options.val_fraction = 1;
  expect_error([&] { prepare_dataset(options); }, {"validation fraction 1"});
  options = options_for(scratch);
  options.shard_tokens = 0;
  expect_error([&] { prepare_dataset(options); }, {"tokens per shard"});
  options = options_for(scratch);
  options.inputs = {write_file(scratch / "empty.txt", "")};
  expect_error([&] { prepare_dataset(options); }, {"no document with text", "empty, or white space alone: 1"});
  options.inputs = {write_file(scratch / "one.txt", "one")};
  options.val_fraction = 0.999999;
  expect_error([&] { prepare_dataset(options); }, {"all 1 documents fell to validation"});
  EXPECT_FALSE(fs::exists(options.output));
}

TEST(Prepare, TheOutputIsNoPartOfTheInput) {
  const TemporaryFolder scratch;
  PrepareOptions options = options_for(scratch);
  const fs::path input = scratch / "in";
  fs::create_directory(input);
  fs::rename(options.inputs.front(), input / "in.jsonl");
  options.inputs = {input};
  options.output = input / "out";
  expect_error([&] { prepare_dataset(options); }, {options.output.string(), "within the input folder"});
  options.output = input.string() + "_beside";
  EXPECT_NO_THROW(prepare_dataset(options));
}

/// The input is a shard of a dataset instead of text.
TEST(Prepare, ADatasetIsNoText) {
  const TemporaryFolder scratch;
  PrepareOptions options = options_for(scratch);
  prepare_dataset(options);
  options.inputs = {options.output / "train-00000.tokens"};
  options.output = scratch / "other";
  expect_error([&] { prepare_dataset(options); }, {"train-00000.tokens", "prepared already"});
}

TEST(Prepare, BlankDocumentsAreSkippedAndCounted) {
  const TemporaryFolder scratch;
  PrepareOptions options = options_for(scratch);
  options.inputs = {write_file(scratch / "in.jsonl", "{\"text\": \"a\"}\n{\"text\": \" \\n\"}\n{\"text\": \"b\"}\n")};
  options.val_fraction = 0;
  const PrepareResult result = prepare_dataset(options);
  EXPECT_EQ(result.source.num_empty_documents, 1u);
  EXPECT_EQ(result.source.first_empty, (scratch / "in.jsonl").string() + ":2");
  EXPECT_EQ(all_tokens(options.output, "train"), (std::vector<std::int32_t>{256, 'a', 257, 256, 'b', 257}));
}

TEST(Manifest, EveryFlippedBitIsFound) {
  const TemporaryFolder scratch;
  PrepareOptions options = options_for(scratch, 30);
  prepare_dataset(options);
  const fs::path path = options.output / kManifestName;
  const std::string good = read_text_file(path);
  const auto canonical = [](const std::string& text) { return nlohmann::json::parse(text, nullptr, false); };
  int num_found = 0;
  for (std::size_t i = 0; i < good.size(); ++i) {
    std::string bad = good;
    bad[i] = static_cast<char>(bad[i] ^ (1 << i % 7));
    if (canonical(bad) == canonical(good)) continue;  // only white space differs
    flip_bit(path, i, static_cast<int>(i % 7));
    expect_error([&] { read_manifest(options.output); }, {path.string()});
    flip_bit(path, i, static_cast<int>(i % 7));
    ++num_found;
  }
  EXPECT_GT(num_found, 300);
  EXPECT_NO_THROW(read_manifest(options.output));
  for (const std::size_t size : {std::size_t{0}, good.size() / 2, good.size() - 3}) {
    write_file(path, good.substr(0, size));
    expect_error([&] { read_manifest(options.output); }, {path.string()});
  }
}

// These manifests have the right checksum, as a hostile file would have.
TEST(Manifest, ManifestsThatLie) {
  const TemporaryFolder scratch;
  const auto folder = make_dataset(scratch, 3, 1000);
  const auto path = folder / kManifestName;
  const Manifest good = read_manifest(folder);
  for (const std::string& name : {std::string("../other/train-00000.tokens"), std::string("/etc/hostname"),
                                  std::string(".."), std::string(), std::string("a\0b", 3), std::string(5000, 'x')}) {
    Manifest manifest = good;
    manifest.splits.at("train").at(0).file = name;
    write_manifest(folder, manifest);
    expect_error([&] { read_manifest(folder); }, {path.string(), "train", "expected the name of a file"});
  }
  write_manifest(folder, good);
  std::string text = read_text_file(path);
  text.insert(text.find('{') + 1, "\"x\": " + std::string(300'000, '[') + std::string(300'000, ']') + ",");
  write_file(path, text);
  expect_error([&] { read_manifest(folder); }, {path.string(), "nested deeper"});
  EXPECT_NO_THROW(expect_error([&] { read_manifest(std::string(5000, 'x')); }, {"File name too long"}));
  // A folder that the system does not show is not called missing.
  const auto loop = folder.parent_path() / "loop";
  std::filesystem::create_symlink("loop", loop);
  expect_error([&] { read_manifest(loop); }, {loop.string(), "Too many levels"});
  expect_error([&] { load_tokenizer(loop.string()); }, {loop.string(), "Too many levels"});
  PrepareOptions options = options_for(scratch);
  options.output = loop;
  expect_error([&] { prepare_dataset(options); }, {loop.string(), "Too many levels"});
}

// Existing datasets and checkpoints depend on the form of the manifest and on the checksum of a split.
TEST(Manifest, VersionOneIsPinned) {
  const TemporaryFolder scratch;
  write_file(scratch.path() / kManifestName, R"({
  "format": "tessera-dataset",
  "version": 1,
  "tokenizer": {"kind": "bytes", "checksum": "0123456789abcdef"},
  "vocab_size": 258,
  "bos_id": 256,
  "eos_id": 257,
  "val_fraction": 0.01,
  "seed": 3,
  "splits": {
    "train": {
      "num_tokens": 30,
      "num_documents": 3,
      "shards": [
        {"file": "train-00000.tokens", "num_bytes": 300, "num_tokens": 10, "num_documents": 1,
         "checksum": "00000000000000aa"},
        {"file": "train-00001.tokens", "num_bytes": 400, "num_tokens": 20, "num_documents": 2,
         "checksum": "00000000000000bb"}
      ]
    }
  },
  "checksum": "9b7ff548b0243b47"
}
)");
  const Manifest manifest = read_manifest(scratch.path());
  EXPECT_EQ(manifest.tokenizer_kind, "bytes");
  EXPECT_EQ(manifest.tokenizer_checksum, 0x0123456789abcdefu);
  EXPECT_EQ(manifest.seed, 3u);
  ASSERT_EQ(manifest.splits.at("train").size(), 2u);
  EXPECT_EQ(manifest.splits.at("train")[1].num_bytes, 400u);
  EXPECT_EQ(split_checksum(manifest, "train"), 0xc7b416e725553102u);
}

TEST(Manifest, ShardsMustBeThoseOfTheManifest) {
  const TemporaryFolder scratch;
  PrepareOptions options = options_for(scratch);
  options.shard_tokens = 500;
  prepare_dataset(options);
  const Manifest manifest = read_manifest(options.output);
  const fs::path shard0 = options.output / "train-00000.tokens";
  const fs::path shard1 = options.output / "train-00001.tokens";
  const auto open = [&] { open_split(options.output, manifest, "train"); };
  EXPECT_NO_THROW(open());
  fs::rename(shard1, scratch / "aside");
  expect_error(open, {shard1.string(), "missing", "dataset.json"});
  fs::copy_file(shard0, shard1);
  expect_error(open, {shard1.string(), "another dataset"});
  fs::rename(scratch / "aside", shard1);
  EXPECT_NO_THROW(open());
  for (std::uint64_t ShardEntry::*number :
       {&ShardEntry::num_bytes, &ShardEntry::num_tokens, &ShardEntry::num_documents}) {
    Manifest lying = manifest;
    lying.splits.at("train").at(1).*number += 1;
    expect_error([&] { open_split(options.output, lying, "train"); },
                 {shard1.string(), "tokens", "documents", "bytes", "lists",
                  std::to_string(lying.splits.at("train").at(1).*number)});
  }
  expect_error([&] { open_split(options.output, manifest, "test"); }, {"'test'"});
  expect_error(
      [&] { read_manifest(scratch / "none"); },
      {"none", "no such folder", "tessera data prepare --input TEXTS", "--output " + (scratch / "none").string()});
  expect_error([&] { read_manifest(scratch.path()); }, {"dataset.json", "--output " + scratch.path().string()});
}

}  // namespace
}  // namespace tessera::data
