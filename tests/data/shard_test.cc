#include "data/shard.h"

#include <atomic>
#include <functional>
#include <thread>

#include "data/tokenizers/byte_tokenizer.h"
#include "support.h"

namespace tessera::data {
namespace {

namespace fs = std::filesystem;

constexpr std::uint64_t kGoldenHeaderChecksum = 8251959005882344890u;

/// A tokenizer without any text. Its ids take two or four bytes, depending on vocab_size.
class FakeTokenizer final : public Tokenizer {
 public:
  explicit FakeTokenizer(std::int32_t vocab_size) : vocab_size_(vocab_size) {}
  std::string_view kind() const override { return "fake"; }
  std::int32_t vocab_size() const override { return vocab_size_; }
  std::int32_t bos_id() const override { return 0; }
  std::int32_t eos_id() const override { return 1; }
  std::vector<std::int32_t> encode(std::string_view) const override { return {}; }
  std::string decode(std::span<const std::int32_t>) const override { return {}; }
  std::vector<TokenizerFile> files() const override { return {}; }

 private:
  std::int32_t vocab_size_;
};

fs::path write_small(const fs::path& path) {
  const ByteTokenizer tokenizer;
  ShardWriter writer(path, tokenizer);
  for (const char* text : {"one", "", "three of them"}) writer.add_document(tokenizer.encode(text));
  writer.finish();
  return path;
}

/// Writes a shard of five blocks and a part: a document of 160,000 tokens between two small ones.
fs::path write_large(const fs::path& path, std::vector<std::int32_t>* tokens = nullptr) {
  const FakeTokenizer tokenizer(60'000);
  std::vector<std::int32_t> large(160'000);
  for (std::size_t i = 0; i < large.size(); ++i) large[i] = static_cast<std::int32_t>(i * 7919 % 60'000);
  const std::vector<std::int32_t> small{5, 6};
  ShardWriter writer(path, tokenizer);
  writer.add_document(small);
  writer.add_document(large);
  writer.add_document(small);
  writer.finish();
  if (tokens != nullptr) {
    *tokens = {0, 5, 6, 1, 0};
    tokens->insert(tokens->end(), large.begin(), large.end());
    tokens->insert(tokens->end(), {1, 0, 5, 6, 1});
  }
  return path;
}

std::vector<std::int32_t> read(const Shard& shard, std::uint64_t first, std::uint64_t count) {
  std::vector<std::int32_t> tokens(count);
  shard.read_tokens(first, tokens);
  return tokens;
}

TEST(Shard, RoundTrip) {
  const TemporaryFolder scratch;
  const Shard shard(write_small(scratch / "a.tokens"));
  EXPECT_EQ(shard.num_documents(), 3u);
  EXPECT_EQ(shard.num_tokens(), 3u + 13u + 6u);
  EXPECT_EQ(shard.header().token_bytes, 2u);
  EXPECT_EQ(shard.header().max_token_id, 257u);
  EXPECT_EQ(read(shard, 0, 7), (std::vector<std::int32_t>{256, 'o', 'n', 'e', 257, 256, 257}));
  EXPECT_EQ(shard.document(1).begin, 5u);
  EXPECT_EQ(shard.document(1).end, 7u);
  EXPECT_EQ(shard.document(2).end, shard.num_tokens());
  shard.verify();
  EXPECT_THROW(shard.document(3), InternalError);
  EXPECT_THROW(read(shard, 20, 3), InternalError);
}

TEST(Shard, RoundTripOfManyBlocks) {
  const TemporaryFolder scratch;
  std::vector<std::int32_t> expected;
  const Shard shard(write_large(scratch / "a.tokens", &expected));
  EXPECT_EQ(read(shard, 0, shard.num_tokens()), expected);
  EXPECT_EQ(read(shard, 70'001, 33), std::vector<std::int32_t>(expected.begin() + 70'001, expected.begin() + 70'034));
  shard.verify();
}

TEST(Shard, WideTokens) {
  const TemporaryFolder scratch;
  for (const auto& [vocab_size, width] :
       std::vector<std::pair<std::int32_t, std::uint32_t>>{{65'536, 2}, {65'537, 4}, {2'147'483'647, 4}}) {
    const FakeTokenizer tokenizer(vocab_size);
    ShardWriter writer(scratch / "a.tokens", tokenizer);
    writer.add_document(std::vector<std::int32_t>{vocab_size - 1, 65'535});
    writer.finish();
    const Shard shard(scratch / "a.tokens");
    EXPECT_EQ(shard.header().token_bytes, width);
    EXPECT_EQ(shard.header().max_token_id, static_cast<std::uint32_t>(vocab_size - 1));
    EXPECT_EQ(read(shard, 0, 4), (std::vector<std::int32_t>{0, vocab_size - 1, 65'535, 1}));
    shard.verify();
    ShardWriter bad(scratch / "b.tokens", tokenizer);
    EXPECT_THROW(bad.add_document(std::vector<std::int32_t>{vocab_size}), InternalError);
    EXPECT_THROW(bad.add_document(std::vector<std::int32_t>{-1}), InternalError);
  }
  EXPECT_EQ(std::distance(fs::directory_iterator(scratch.path()), {}), 1);
}

// Existing files depend on the format, so this test pins version 1.
TEST(Shard, FormatIsPinned) {
  const TemporaryFolder scratch;
  const std::string content = read_text_file(write_small(scratch / "a.tokens"));
  ASSERT_EQ(content.size(), 128u + 44 + 4 + 4 * 8 + 8);
  EXPECT_EQ(content.substr(0, 8), "TSRATOK\n");
  const auto u64_at = [&](std::size_t at) {
    std::uint64_t value;
    std::memcpy(&value, content.data() + at, sizeof value);
    return value;
  };
  EXPECT_EQ(u64_at(32), 22u);   // number of tokens
  EXPECT_EQ(u64_at(40), 3u);    // number of documents
  EXPECT_EQ(u64_at(48), 128u);  // offsets of the three sections
  EXPECT_EQ(u64_at(56), 176u);
  EXPECT_EQ(u64_at(64), 208u);
  EXPECT_EQ(u64_at(72), 216u);    // size of the file
  EXPECT_EQ(u64_at(80), 65536u);  // size of a block
  EXPECT_EQ(u64_at(176), 0u);     // starts of the documents
  EXPECT_EQ(u64_at(184), 5u);
  EXPECT_EQ(u64_at(192), 7u);
  EXPECT_EQ(u64_at(200), 22u);
  EXPECT_EQ(u64_at(120), kGoldenHeaderChecksum);
}

TEST(Shard, EveryLengthButTheRightOneIsAnError) {
  const TemporaryFolder scratch;
  const std::string good = read_text_file(write_small(scratch / "a.tokens"));
  const auto cut = write_file(scratch / "cut.tokens", good);
  for (std::size_t size = good.size(); size-- > 0;) {
    fs::resize_file(cut, size);
    expect_error([&] { Shard shard(cut); }, {cut.string(), fmt::format("{} bytes", size)});
  }
  const auto path = write_file(scratch / "long.tokens", good + "x");
  expect_error([&] { Shard shard(path); }, {path.string(), fmt::format("{} bytes", good.size() + 1)});
  expect_error([&] { Shard shard(scratch / "missing.tokens"); }, {"missing.tokens"});
  expect_error([&] { Shard shard(scratch.path()); }, {scratch.path().string()});
}

TEST(Shard, EveryFlippedBitIsFound) {
  const TemporaryFolder scratch;
  const auto path = write_small(scratch / "a.tokens");
  const std::size_t size = fs::file_size(path);
  const std::size_t table = size - 8;
  for (std::size_t bit = 0; bit < size * 8; ++bit) {
    flip_bit(path, bit / 8, static_cast<int>(bit % 8));
    const bool found_at_open = bit / 8 < sizeof(ShardHeader) || bit / 8 >= table;
    if (found_at_open) {
      expect_error([&] { Shard shard(path); }, {path.string()});
    } else {
      const Shard shard(path);
      expect_error([&] { shard.verify(); }, {path.string(), "bytes 128 to 207", "damaged"});
      expect_error([&] { read(shard, 0, 1); }, {path.string(), "damaged"});
      expect_error([&] { shard.document(0); }, {path.string(), "damaged"});
    }
    flip_bit(path, bit / 8, static_cast<int>(bit % 8));
  }
}

TEST(Shard, DamageIsFoundInItsBlockOnly) {
  const TemporaryFolder scratch;
  const auto path = write_large(scratch / "a.tokens");
  std::string content = read_text_file(path);
  const std::size_t offset = sizeof(ShardHeader) + 2 * kShardBlockBytes + 100;  // third block
  content[offset] ^= 0x20;
  write_file(path, content);
  const Shard shard(path);
  constexpr std::uint64_t kBlockTokens = kShardBlockBytes / 2;
  EXPECT_NO_THROW(read(shard, 0, 2 * kBlockTokens));
  EXPECT_NO_THROW(read(shard, 3 * kBlockTokens, 1000));
  EXPECT_NO_THROW(shard.document(1));
  for (int i = 0; i < 2; ++i) {  // every read finds the damage, not only the first
    expect_error([&] { read(shard, 3 * kBlockTokens - 1, 1); }, {path.string(), "damaged"});
    expect_error([&] { read(shard, 2 * kBlockTokens - 1, 2); }, {path.string(), "damaged"});
  }
  expect_error([&] { shard.verify(); }, {path.string(), "damaged"});
}

// These headers have right checksums and wrong numbers. None of the numbers may lead outside of the file.
TEST(Shard, NumbersThatDoNotFitTheFile) {
  const TemporaryFolder scratch;
  constexpr std::uint64_t kHuge = ~std::uint64_t{0};
  const std::vector<std::function<void(ShardHeader&)>> changes{[](ShardHeader& h) { h.version = 2; },
                                                               [](ShardHeader& h) { h.token_bytes = 0; },
                                                               [](ShardHeader& h) { h.token_bytes = 3; },
                                                               [](ShardHeader& h) { h.token_bytes = 4; },
                                                               [](ShardHeader& h) { h.num_tokens = 0; },
                                                               [](ShardHeader& h) { h.num_tokens += 4; },
                                                               [](ShardHeader& h) { h.num_tokens = kHuge; },
                                                               [](ShardHeader& h) { h.num_tokens = kHuge / 2 + 1; },
                                                               [](ShardHeader& h) { h.num_documents = 0; },
                                                               [](ShardHeader& h) { h.num_documents = kHuge; },
                                                               [](ShardHeader& h) { h.num_documents = kHuge / 8; },
                                                               [](ShardHeader& h) { h.num_documents += 1; },
                                                               [](ShardHeader& h) { h.tokens_offset = 0; },
                                                               [](ShardHeader& h) { h.tokens_offset = kHuge; },
                                                               [](ShardHeader& h) { h.documents_offset += 8; },
                                                               [](ShardHeader& h) { h.documents_offset = kHuge - 7; },
                                                               [](ShardHeader& h) { h.checksums_offset = 0; },
                                                               [](ShardHeader& h) { h.checksums_offset = kHuge; },
                                                               [](ShardHeader& h) { h.file_bytes += 8; },
                                                               [](ShardHeader& h) { h.block_bytes = 0; },
                                                               [](ShardHeader& h) { h.block_bytes = 8; },
                                                               [](ShardHeader& h) { h.vocab_size = 0; },
                                                               [](ShardHeader& h) { h.vocab_size = 257; },
                                                               [](ShardHeader& h) {
                                                                 h.vocab_size = ~0u;
                                                                 h.max_token_id = ~0u - 1;
                                                               },
                                                               [](ShardHeader& h) { h.max_token_id = 258; },
                                                               [](ShardHeader& h) { h.bos_id = 258; },
                                                               [](ShardHeader& h) { h.eos_id = 300; },
                                                               [](ShardHeader& h) { h.table_checksum ^= 1; }};
  for (std::size_t i = 0; i < changes.size(); ++i) {
    SCOPED_TRACE(i);
    const auto path = write_small(scratch / "a.tokens");
    EXPECT_NO_THROW(Shard{path});
    change_header(path, changes[i]);
    expect_error([&] { Shard shard(path); }, {path.string()});
  }
}

TEST(Shard, VerifyFindsTokensOutsideOfDocuments) {
  const TemporaryFolder scratch;
  const auto path = write_small(scratch / "a.tokens");
  change_header(path, [](ShardHeader& h) { h.num_tokens += 1; });  // counts one of the zeros behind the tokens
  const Shard shard(path);
  expect_error([&] { shard.verify(); }, {path.string(), "last document ends at token 22 of 23"});
}

TEST(Shard, VerifyFindsIdsAboveTheMaximum) {
  const TemporaryFolder scratch;
  const auto path = write_small(scratch / "a.tokens");
  change_header(path, [](ShardHeader& h) { h.max_token_id = 256; });
  const Shard shard(path);
  expect_error([&] { shard.verify(); }, {path.string(), "token 4 has id 257"});
}

// The block is as large as a block can be: its end is beyond 2^64.
TEST(Shard, ABlockMayBeLargerThanTheFile) {
  const TemporaryFolder scratch;
  const auto path = write_small(scratch / "a.tokens");
  const std::vector<std::int32_t> expected = read(Shard(path), 0, 22);
  for (const std::uint64_t size : {~std::uint64_t{0}, ~std::uint64_t{0} - 127, std::uint64_t{1} << 63}) {
    change_header(path, [&](ShardHeader& h) { h.block_bytes = size; });
    const Shard shard(path);
    shard.verify();
    EXPECT_EQ(read(shard, 0, 22), expected);
  }
}

TEST(Shard, ManyThreadsReadAtOnce) {
  const TemporaryFolder scratch;
  std::vector<std::int32_t> expected;
  const Shard shard(write_large(scratch / "a.tokens", &expected));
  std::atomic<int> num_wrong{0};
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (std::size_t first = t; first + 500 < expected.size(); first += 997) {
        std::vector<std::int32_t> tokens(500);
        shard.read_tokens(first, tokens);
        if (!std::equal(tokens.begin(), tokens.end(), expected.begin() + static_cast<std::ptrdiff_t>(first)))
          ++num_wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(num_wrong, 0);
}

TEST(ShardWriter, NothingIsLeftWithoutFinish) {
  const TemporaryFolder scratch;
  {
    ShardWriter writer(scratch / "a.tokens", ByteTokenizer());
    writer.add_document(std::vector<std::int32_t>{1, 2, 3});
  }
  EXPECT_TRUE(fs::is_empty(scratch.path()));
}

}  // namespace
}  // namespace tessera::data
