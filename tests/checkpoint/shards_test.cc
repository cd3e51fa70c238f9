// Tests that pieces of tensors in the files of many ranks are assembled for any other sharding. Pieces that do not fit
// together are refused.
#include "checkpoint/shards.h"

#include <gtest/gtest.h>

#include <cstring>
#include <numeric>

#include "tests/data/support.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using data::TemporaryFolder;

/// How a tensor is spread over files: a dim is cut into parts, and each part into ranges of equal size.
struct Spread {
  int dim = 0;
  std::int64_t blocks = 1, parts = 1, ranges = 1;
};

std::vector<Piece> pieces_of(const Shape& shape, const Spread& spread) {
  std::vector<Piece> pieces;
  for (std::int64_t part = 0; part < spread.parts; ++part) {
    const Slice slice{.global = shape, .dim = spread.dim, .blocks = spread.blocks, .part = part, .parts = spread.parts};
    const std::int64_t size = slice.local().num_elements();
    for (std::int64_t i = 0; i < spread.ranges; ++i) {
      pieces.push_back({slice, size * i / spread.ranges, size * (i + 1) / spread.ranges});
    }
  }
  return pieces;
}

/// Returns the numbers of a piece of the tensor 0, 1, 2, ...
std::vector<float> numbers_of(const Piece& piece) {
  std::vector<float> numbers;
  piece.slice.for_each_run(piece.begin, piece.end, [&](std::int64_t, std::int64_t global, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) numbers.push_back(static_cast<float>(global + i));
  });
  return numbers;
}

Tensor view(std::vector<float>& numbers) {
  return Tensor(numbers.data(), {static_cast<std::int64_t>(numbers.size())}, DType::kFloat32, Device::kCpu);
}

/// Writes one shard per piece.
void write_shards(const fs::path& folder, std::int64_t step, const std::vector<Piece>& pieces) {
  fs::create_directories(folder);
  const auto num_shards = static_cast<std::int64_t>(pieces.size());
  for (std::int64_t shard = 0; shard < num_shards; ++shard) {
    const Piece& piece = pieces[static_cast<std::size_t>(shard)];
    std::vector<float> numbers = numbers_of(piece);
    const TensorPiece tensor{"w", piece, view(numbers)};
    write_shard(folder / shard_file_name("model", shard, num_shards), {step, shard, num_shards}, std::span(&tensor, 1));
  }
}

TEST(Shards, AnyCutIsReadFromAnyOther) {
  const Shape shape({6, 8, 5});
  const Spread spreads[] = {{},
                            {.ranges = 7},
                            {.dim = 0, .parts = 3, .ranges = 2},
                            {.dim = 0, .blocks = 3, .parts = 2},
                            {.dim = 1, .parts = 4, .ranges = 3},
                            {.dim = 1, .blocks = 2, .parts = 2, .ranges = 5},
                            {.dim = 2, .parts = 5}};
  for (const Spread& saved : spreads) {
    const TemporaryFolder scratch;
    const std::vector<Piece> pieces = pieces_of(shape, saved);
    write_shards(scratch.path(), 3, pieces);
    const ShardFiles files(scratch.path(), "model", 3, static_cast<std::int64_t>(pieces.size()));
    EXPECT_EQ(files.num_tensors(), 1u);
    const AssembledTensor tensor = files.at("w", shape);
    for (const Spread& loaded : spreads) {
      for (const Piece& piece : pieces_of(shape, loaded)) {
        std::vector<float> numbers(static_cast<std::size_t>(piece.end - piece.begin));
        tensor.read(piece, numbers.data());
        EXPECT_EQ(numbers, numbers_of(piece));
      }
    }
    for (std::int64_t at = 0; at < shape.num_elements();) {
      const std::span<const float> stretch = tensor.from(at);
      ASSERT_FALSE(stretch.empty());
      EXPECT_EQ(stretch.front(), static_cast<float>(at));
      EXPECT_EQ(stretch.back(), static_cast<float>(at) + static_cast<float>(stretch.size() - 1));
      at += static_cast<std::int64_t>(stretch.size());
    }
  }
}

// If a rank's pieces have not changed, its own file is enough. The file does not count as having any other piece, even
// one that lies within its own.
TEST(Shards, ARankFindsItsPiecesInItsOwnFile) {
  const Shape shape({6, 8, 5});
  const TemporaryFolder scratch;
  const std::vector<Piece> pieces = pieces_of(shape, {.dim = 1, .blocks = 2, .parts = 2, .ranges = 5});
  write_shards(scratch.path(), 3, pieces);
  const auto num_shards = static_cast<std::int64_t>(pieces.size());
  for (std::int64_t shard = 0; shard < num_shards; ++shard) {
    if (shard > 0) fs::remove(scratch / shard_file_name("model", shard - 1, num_shards));
    const ShardFiles own(scratch.path(), "model", 3, num_shards, {shard});
    const Piece& piece = pieces[static_cast<std::size_t>(shard)];
    std::vector<float> numbers(static_cast<std::size_t>(piece.end - piece.begin));
    TensorPiece wanted{"w", piece, view(numbers)};
    ASSERT_TRUE(own.has(std::span(&wanted, 1)));
    own.piece_at("w", piece).read(piece, numbers.data());
    EXPECT_EQ(numbers, numbers_of(piece));
    for (const Piece& other : pieces) {
      wanted.piece = other;
      EXPECT_EQ(own.has(std::span(&wanted, 1)), other == piece);
    }
    wanted.piece = piece;
    --wanted.piece.end;
    EXPECT_FALSE(own.has(std::span(&wanted, 1)));
    wanted = {"v", piece, view(numbers)};
    EXPECT_FALSE(own.has(std::span(&wanted, 1)));
  }
}

/// The file does not say how a whole tensor could be cut.
TEST(Shards, AWholeTensorIsFoundHoweverItCouldBeCut) {
  const Shape shape({6, 8});
  const TemporaryFolder scratch;
  const Piece piece{.slice = {.global = shape, .dim = 1, .blocks = 2}, .begin = 0, .end = shape.num_elements()};
  write_shards(scratch.path(), 3, {piece});
  const ShardFiles files(scratch.path(), "model", 3, 1);
  std::vector<float> numbers(48);
  const TensorPiece wanted{"w", piece, view(numbers)};
  ASSERT_TRUE(files.has(std::span(&wanted, 1)));
  files.piece_at("w", piece).read(piece, numbers.data());
  EXPECT_EQ(numbers, numbers_of(piece));
}

TEST(Shards, OneRanksFileIsAPlainSafetensorsFile) {
  const TemporaryFolder scratch;
  write_shards(scratch.path(), 3, {Piece::whole({2, 3})});
  const SafetensorsFile file(scratch / "model.safetensors");
  EXPECT_EQ(file.at("w").shape, (std::vector<std::int64_t>{2, 3}));
  EXPECT_EQ(file.metadata().at("format"), "pt");
  EXPECT_FALSE(file.metadata().contains("pieces"));
}

TEST(Shards, AWriterThatIsStoppedLeavesNoFile) {
  const TemporaryFolder scratch;
  std::vector<float> numbers(6);
  const TensorPiece tensor{"w", Piece::whole({6}), view(numbers)};
  std::stop_source stop;
  stop.request_stop();
  expect_error([&] { write_shard(scratch / "model.safetensors", {}, std::span(&tensor, 1), stop.get_token()); },
               {"model.safetensors", "given up"});
  EXPECT_TRUE(fs::is_empty(scratch.path()));
}

TEST(Shards, FilesOfOtherCheckpointsAreRefused) {
  const TemporaryFolder scratch;
  const std::vector<Piece> halves = pieces_of({4, 4}, {.ranges = 2}), thirds = pieces_of({4, 3}, {.ranges = 3});
  write_shards(scratch / "3", 3, halves);
  write_shards(scratch / "4", 4, halves);
  write_shards(scratch / "of-three", 3, thirds);
  const auto open = [&](std::int64_t step, std::int64_t num_shards) {
    return ShardFiles(scratch / "3", "model", step, num_shards);
  };
  open(3, 2);
  const std::string name = "model-00001-of-00002.safetensors";
  expect_error([&] { open(4, 2); }, {"model-00000-of-00002", "step is \"3\"", "expected 4"});
  expect_error([&] { open(3, 3); }, {"model-00000-of-00003.safetensors", "cannot open"});
  expect_error([&] { ShardFiles(scratch / "3", "optimizer", 3, 2); }, {"optimizer-00000-of-00002"});
  fs::copy_file(scratch / "4" / name, scratch / "3" / name, fs::copy_options::overwrite_existing);
  expect_error([&] { open(3, 2); }, {name, "step is \"4\"", "expected 3"});
  fs::copy_file(scratch / "of-three/model-00001-of-00003.safetensors", scratch / "3" / name,
                fs::copy_options::overwrite_existing);
  expect_error([&] { open(3, 2); }, {name, "num_shards is \"3\"", "expected 2"});
  fs::copy_file(scratch / "3/model-00000-of-00002.safetensors", scratch / "3" / name,
                fs::copy_options::overwrite_existing);
  expect_error([&] { open(3, 2); }, {name, "shard is \"0\"", "expected 1"});
  fs::remove(scratch / "3" / name);
  expect_error([&] { open(3, 2); }, {name, "cannot open"});
  const NamedTensor no_tensors[1] = {};
  write_safetensors(scratch / "3" / name, std::span(no_tensors, 0), {{"format", "pt"}});
  expect_error([&] { open(3, 2); }, {name, "no step"});
}

TEST(Shards, OnlyTheOptimizersMayBeInBfloat16) {
  const TemporaryFolder scratch;
  const Piece whole = Piece::whole({3, 5});
  std::vector<BFloat16> numbers;
  for (const float number : numbers_of(whole)) numbers.emplace_back(number);
  const TensorPiece tensor{"w", whole, Tensor(numbers.data(), {15}, DType::kBFloat16, Device::kCpu)};
  for (const std::string_view kind : {kModelShards, kOptimizerShards}) {
    write_shard(scratch / shard_file_name(kind, 0, 1), {}, std::span(&tensor, 1));
  }
  std::vector<float> read(6);
  const Piece middle{.slice = {.global = {3, 5}, .dim = 0}, .begin = 4, .end = 10};
  ShardFiles(scratch.path(), kOptimizerShards, 0, 1).at("w", {3, 5}).read(middle, read.data());
  EXPECT_EQ(read, numbers_of(middle));
  // Each of two files has another type. The tensor consists of numbers from both.
  std::vector<float> wide = numbers_of({whole.slice, 0, 7});
  const TensorPiece pieces[] = {{"w", {whole.slice, 0, 7}, view(wide)},
                                {"w", {whole.slice, 7, 15}, Tensor(&numbers[7], {8}, DType::kBFloat16, Device::kCpu)}};
  for (const std::int64_t shard : {0, 1}) {
    write_shard(scratch / shard_file_name(kOptimizerShards, shard, 2), {0, shard, 2}, std::span(&pieces[shard], 1));
  }
  ShardFiles(scratch.path(), kOptimizerShards, 0, 2).at("w", {3, 5}).read(middle, read.data());
  EXPECT_EQ(read, numbers_of(middle));
  const NamedTensor whole_numbers{"w", Tensor(&numbers[0], {7}, DType::kInt32, Device::kCpu)};
  write_safetensors(scratch / "optimizer.safetensors", std::span(&whole_numbers, 1), shard_metadata({}));
  expect_error([&] { ShardFiles(scratch.path(), kOptimizerShards, 0, 1); }, {"I32", "expected F32 or BF16"});
  expect_error([&] { ShardFiles(scratch.path(), kModelShards, 0, 1); },
               {"model.safetensors", "'w'", "BF16", "expected F32"});
}

TEST(Shards, GapsAndOverlapsAreRefused) {
  const TemporaryFolder scratch;
  const auto read = [&](const std::vector<Piece>& pieces, const Shape& shape = {4, 6}) {
    write_shards(scratch.path(), 0, pieces);
    ShardFiles(scratch.path(), "model", 0, static_cast<std::int64_t>(pieces.size())).at("w", shape);
  };
  const Slice whole{.global = {4, 6}};
  const Slice left{.global = {4, 6}, .dim = 1, .part = 0, .parts = 2},
      right{.global = {4, 6}, .dim = 1, .part = 1, .parts = 2};
  read({{whole, 0, 10}, {whole, 10, 24}});
  read({{left, 0, 12}, {right, 0, 5}, {right, 5, 12}});
  expect_error([&] { read({{whole, 0, 10}, {whole, 11, 24}}); }, {scratch.path(), "'w'", "10 to 10 of 24"});
  expect_error([&] { read({{whole, 0, 10}, {whole, 10, 20}}); }, {"'w'", "20 to 23 of 24"});
  expect_error([&] { read({{whole, 1, 10}, {whole, 10, 24}}); }, {"'w'", "0 to 0 of 24"});
  expect_error(
      [&] {
        read({{whole, 0, 11}, {whole, 10, 24}});
      },
      {"model-00001-of-00002", "'w'", "number 10", "model-00000-of-00002"});
  expect_error([&] { read({{left, 0, 12}, {right, 0, 12}, {whole, 7, 8}}); }, {"'w'", "number 7", "as well"});
  expect_error([&] { read({{left, 0, 12}, {right, 0, 11}}); }, {"'w'", "23 to 23 of 24"});
  expect_error([&] { read({{whole, 0, 24}}, {6, 4}); }, {"model.safetensors", "[4, 6]", "[6, 4]"});
  expect_error(
      [&] {
        read({{whole, 0, 10}, {{.global = {6, 4}}, 10, 24}});
      },
      {"model-00001-of-00002", "[6, 4]", "model-00000-of-00002", "[4, 6]"});
  write_shards(scratch.path(), 0, {{whole, 0, 24}});
  expect_error([&] { ShardFiles(scratch.path(), "model", 0, 1).at("v", {4, 6}); }, {scratch.path(), "'v'"});
}

TEST(Shards, PiecesThatLie) {
  const TemporaryFolder scratch;
  std::vector<float> numbers(12);
  const auto refused = [&](const std::string& pieces, const std::vector<std::string>& parts) {
    auto metadata = shard_metadata({});
    metadata["pieces"] = pieces;
    const NamedTensor tensor{"w", view(numbers)};
    write_safetensors(scratch / "model.safetensors", std::span(&tensor, 1), metadata);
    std::vector<std::string> all = parts;
    all.emplace_back("model.safetensors");
    expect_error([&] { ShardFiles(scratch.path(), "model", 0, 1); }, all);
  };
  const auto piece = [](const char* shape, int dim, int blocks, int part, int parts, int begin, int end) {
    return fmt::format(
        R"({{"w": {{"shape": {}, "dim": {}, "blocks": {}, "part": {}, "parts": {}, "begin": {}, "end": {}}}}})", shape,
        dim, blocks, part, parts, begin, end);
  };
  refused("{", {"not JSON"});
  refused(std::string(300'000, '['), {"nested deeper"});
  refused("[]", {"no JSON object"});
  refused(R"({"w": 3})", {"'w'", "expected an object"});
  refused(R"({"v": {}})", {"'v'"});
  refused(R"({"w": {}})", {"shape is missing"});
  refused(piece("[0, 4]", 0, 1, 0, 1, 0, 12), {"shape"});
  refused(piece("[-4, 4]", 0, 1, 0, 1, 0, 12), {"shape"});
  refused(piece("[1.5, 4]", 0, 1, 0, 1, 0, 12), {"shape"});
  refused(piece("[]", 0, 1, 0, 1, 0, 12), {"1 to 4 dims"});
  refused(piece("[1, 2, 2, 2, 2]", 0, 1, 0, 1, 0, 12), {"1 to 4 dims"});
  refused(piece("[4294967296, 4294967296]", 0, 1, 0, 1, 0, 12), {"product"});
  refused(piece("[4, 6]", 2, 1, 0, 1, 0, 12), {"dim", "too large"});
  refused(piece("[4, 6]", -1, 1, 0, 1, 0, 12), {"dim"});
  refused(piece("[4, 6]", 0, 0, 0, 1, 0, 12), {"cannot be cut into 0 blocks"});
  refused(piece("[4, 6]", 0, 3, 0, 1, 0, 12), {"cannot be cut into 3 blocks"});
  refused(piece("[4, 6]", 0, 2, 0, 4, 0, 12), {"cannot be cut into 2 blocks of 4 parts"});
  refused(piece("[4, 6]", 0, 1, 0, 0, 0, 12), {"0 parts"});
  refused(piece("[4, 6]", 0, 1, 2, 2, 0, 12), {"part 2 of 2"});
  refused(piece("[4, 6]", 0, 1, 0, 1, 12, 0), {"numbers 12 to 0"});
  refused(piece("[4, 6]", 0, 1, 0, 2, 1, 13), {"numbers 1 to 13 of [2, 6]"});
  refused(piece("[4, 6]", 0, 1, 0, 1, 0, 11), {"of which the file has 12"});
}

}  // namespace
}  // namespace tessera
