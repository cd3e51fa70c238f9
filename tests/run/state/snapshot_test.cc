// The copy that a save writes from: the bytes, what is held while they are written, and the ends of a save.
#include "run/state/snapshot.h"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "base/error.h"
#include "base/file.h"
#include "checkpoint/shards.h"
#include "tests/data/support.h"

namespace tessera {
namespace {

constexpr std::size_t kSmallPiece = 4096;

/// Tensors that begin and end within pieces, of several types, and one that is empty.
struct CopiedState {
  CopiedState() {
    std::iota(large.begin(), large.end(), 1.0f);
    std::iota(small.begin(), small.end(), std::int32_t{-3});
  }
  std::vector<Tensor> tensors() {
    return {Tensor(large.data(), {1000}, DType::kFloat32, Device::kCpu),
            Tensor(small.data(), {7}, DType::kInt32, Device::kCpu),
            Tensor(small.data(), {0}, DType::kInt32, Device::kCpu),
            Tensor(large.data() + 1000, {9000}, DType::kFloat32, Device::kCpu)};
  }
  std::vector<std::byte> bytes() {
    std::vector<std::byte> all;
    for (const Tensor& tensor : tensors()) {
      const auto* begin = static_cast<const std::byte*>(tensor.raw());
      all.insert(all.end(), begin, begin + tensor.num_bytes());
    }
    return all;
  }

  std::vector<float> large = std::vector<float>(10000);
  std::vector<std::int32_t> small = std::vector<std::int32_t>(7);
};

Snapshot::Sink append_to(std::vector<std::byte>& target) {
  return [&target](std::span<const std::byte> bytes) { target.insert(target.end(), bytes.begin(), bytes.end()); };
}

TEST(Snapshot, HasTheBytesOfItsMoment) {
  CopiedState state;
  for (const std::size_t piece_bytes : {std::size_t{64}, kSmallPiece, Snapshot::kPieceBytes}) {
    Snapshot snapshot(nullptr, piece_bytes);
    for (int save = 0; save < 2; ++save) {
      const std::vector<std::byte> before = state.bytes();
      snapshot.start(state.tensors());
      for (float& number : state.large) number += 0.5f;
      std::vector<std::byte> read;
      for (const Tensor& tensor : state.tensors()) snapshot.read(tensor.num_bytes(), append_to(read));
      EXPECT_TRUE(read == before) << piece_bytes << ' ' << save;
      EXPECT_EQ(snapshot.num_held_bytes(), 0u);
    }
  }
}

// A CPU's training waits for the copy, which new pages make slower.
TEST(Snapshot, OnACpuTheNextSaveTakesThePiecesOfThisOne) {
  CopiedState state;
  const std::size_t num_bytes = state.bytes().size();
  Snapshot snapshot(nullptr, kSmallPiece);
  for (int save = 0; save < 2; ++save) {
    snapshot.start(state.tensors());
    EXPECT_EQ(snapshot.num_spare_bytes(), 0u) << save;
    for (const Tensor& tensor : state.tensors()) snapshot.read(tensor.num_bytes(), [](std::span<const std::byte>) {});
    EXPECT_EQ(snapshot.num_spare_bytes(), num_bytes) << save;
  }
  snapshot.start(state.tensors());
  snapshot.drop();
  EXPECT_EQ(snapshot.num_spare_bytes(), num_bytes);
}

TEST(Snapshot, HoldsNoPieceThatIsRead) {
  CopiedState state;
  const std::size_t num_bytes = state.bytes().size();
  Snapshot snapshot(nullptr, kSmallPiece);
  EXPECT_EQ(snapshot.num_held_bytes(), 0u);
  snapshot.start(state.tensors());
  EXPECT_EQ(snapshot.num_held_bytes(), num_bytes);
  std::size_t num_read = 0;
  for (const Tensor& tensor : state.tensors()) {
    snapshot.read(tensor.num_bytes(), [&](std::span<const std::byte> bytes) {
      // What is being written is held, with the rest of its piece and what is behind it.
      EXPECT_EQ(snapshot.num_held_bytes(), num_bytes - num_read / kSmallPiece * kSmallPiece);
      num_read += bytes.size();
    });
  }
  EXPECT_EQ(num_read, num_bytes);
  EXPECT_EQ(snapshot.num_held_bytes(), 0u);
}

TEST(Snapshot, ASaveThatFailsMidwayFreesAllAndTheNextIsWhole) {
  CopiedState state;
  Snapshot snapshot(nullptr, kSmallPiece);
  const auto fail_midway = [&] {
    snapshot.start(state.tensors());
    std::size_t left = 3 * kSmallPiece + 5;
    const auto fill_the_disk = [&](std::span<const std::byte> bytes) {
      require(bytes.size() <= left, "the storage is full");
      left -= bytes.size();
    };
    expect_error(
        [&] {
          for (const Tensor& tensor : state.tensors()) snapshot.read(tensor.num_bytes(), fill_the_disk);
        },
        {"the storage is full"});
    EXPECT_EQ(snapshot.num_held_bytes(), state.bytes().size() - 3 * kSmallPiece);
  };
  fail_midway();
  snapshot.drop();
  EXPECT_EQ(snapshot.num_held_bytes(), 0u);
  EXPECT_THROW(snapshot.read(1, [](std::span<const std::byte>) {}), InternalError);
  fail_midway();  // start() also forgets what was not read
  snapshot.start(state.tensors());
  std::vector<std::byte> read;
  snapshot.read(state.bytes().size(), append_to(read));
  EXPECT_TRUE(read == state.bytes());
}

/// The file is that of the numbers themselves, whatever the pieces, and the copy shrinks while it is written.
TEST(Snapshot, WritesTheFileThatASaveWithoutACopyWrites) {
  const data::TemporaryFolder scratch;
  CopiedState state;
  std::vector<TensorPiece> pieces;
  std::vector<Tensor> tensors;
  for (const auto& [name, begin, end] : {std::tuple{"a", 0, 3000}, {"b", 3000, 3001}, {"c", 3001, 10000}}) {
    tensors.emplace_back(state.large.data() + begin, Shape{end - begin}, DType::kFloat32, Device::kCpu);
    pieces.push_back({name, {{.global = {20000}}, begin, end}, tensors.back()});
  }
  const WrittenFile expected = write_shard(scratch / "model.safetensors", {.step = 3}, pieces);
  Snapshot snapshot(nullptr, kSmallPiece);
  snapshot.start(tensors);
  std::fill(state.large.begin(), state.large.end(), 0.0f);
  std::vector<std::size_t> held;
  const WrittenFile written = write_shard(scratch / "copied.safetensors", {.step = 3}, pieces, {},
                                          [&](const Tensor& tensor, const ByteSink& sink) {
                                            snapshot.read(tensor.num_bytes(), sink);
                                            held.push_back(snapshot.num_held_bytes());
                                          });
  EXPECT_EQ(written.size, expected.size);
  EXPECT_EQ(written.checksum, expected.checksum);
  EXPECT_EQ(read_text_file(scratch / "copied.safetensors"), read_text_file(scratch / "model.safetensors"));
  EXPECT_EQ(held, (std::vector<std::size_t>{40000 - 2 * kSmallPiece, 40000 - 2 * kSmallPiece, 0}));
}

TEST(Snapshot, AStopEndsTheWriting) {
  const data::TemporaryFolder scratch;
  CopiedState state;
  const Tensor tensor(state.large.data(), {10000}, DType::kFloat32, Device::kCpu);
  const TensorPiece piece{"a", Piece::whole({10000}), tensor};
  Snapshot snapshot(nullptr, kSmallPiece);
  snapshot.start(std::span(&tensor, 1));
  std::stop_source stop;
  int num_calls = 0;
  const ReadTensor read = [&](const Tensor& from, const ByteSink& sink) {
    snapshot.read(
        from.num_bytes(),
        [&](std::span<const std::byte> bytes) {
          if (++num_calls == 3) stop.request_stop();
          sink(bytes);
        },
        stop.get_token());
  };
  expect_error([&] { write_shard(scratch / "model.safetensors", {}, std::span(&piece, 1), stop.get_token(), read); },
               {"was given up"});
  EXPECT_EQ(num_calls, 3);
  EXPECT_FALSE(std::filesystem::exists(scratch / "model.safetensors"));
}

}  // namespace
}  // namespace tessera
