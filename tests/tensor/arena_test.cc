#include "tensor/arena.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

std::size_t use(Arena& arena) {
  arena.allocate({3}, DType::kFloat32);
  {
    const ArenaScope scope(arena);
    arena.allocate({100, 2}, DType::kBFloat16);
    arena.allocate_bytes(1);
  }
  arena.allocate_bytes(65);
  return arena.used();
}

TEST(Arena, MeasuringCountsWhatARealOneTakes) {
  Arena measuring;
  EXPECT_EQ(measuring.device(), Device::kMeta);
  EXPECT_EQ(use(measuring), 64u + 128u);
  EXPECT_EQ(measuring.peak(), 64u + 448u + 64u);

  Arena real(64 + 448 + 64);
  EXPECT_EQ(use(real), 64u + 128u);
  EXPECT_EQ(real.peak(), real.capacity());
}

// This must hold also when measuring. Otherwise decisions that depend on it would be measured differently.
TEST(Arena, KnowsItsTensors) {
  Arena measuring, other_measuring, real(1024), other_real(1024);
  for (const auto& [arena, other] : {std::pair{&measuring, &other_measuring}, {&real, &other_real}}) {
    const Tensor first = arena->allocate({5}, DType::kInt32);
    const std::size_t mark = arena->used();
    const Tensor second = arena->allocate({8, 4}, DType::kFloat32);
    EXPECT_TRUE(arena->contains(first));
    EXPECT_TRUE(arena->contains(second.rows(7, 8)));
    EXPECT_FALSE(other->contains(first));
    EXPECT_FALSE(arena->contains(Tensor()));
    arena->release_to(mark);
    EXPECT_TRUE(arena->contains(first));
    EXPECT_FALSE(arena->contains(second));
  }
}

TEST(Arena, GivesAlignedMemoryAsAStack) {
  Arena arena(1024);
  const Tensor first = arena.allocate({1}, DType::kFloat32);
  const std::size_t mark = arena.used();
  const Tensor second = arena.allocate({1}, DType::kFloat32);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(second.raw()) % kAlignment, 0u);
  EXPECT_NE(first.raw(), second.raw());
  arena.release_to(mark);
  EXPECT_EQ(arena.allocate({1}, DType::kFloat32).raw(), second.raw());
}

TEST(Arena, GivesNothingBackWhileItIsHeld) {
  Arena arena(1024);
  void* first = nullptr;
  {
    const ArenaScope scope(arena);
    {
      const ArenaHold hold(arena);
      {
        const ArenaScope inner(arena);
        first = arena.allocate({1}, DType::kFloat32).raw();
      }
      EXPECT_NE(arena.allocate({1}, DType::kFloat32).raw(), first);
    }
    EXPECT_EQ(arena.used(), 2 * kAlignment);
  }
  EXPECT_EQ(arena.used(), 0u);
  EXPECT_EQ(arena.allocate({1}, DType::kFloat32).raw(), first);
}

TEST(Arena, MoreThanPlannedThrows) {
  Arena arena(128);
  arena.allocate_bytes(128);
  EXPECT_THROW(arena.allocate_bytes(1), InternalError);
}

TEST(Arena, ScopesNestAndPeaksStay) {
  Arena arena(1024);
  {
    const ArenaScope outer(arena);
    arena.allocate_bytes(64);
    {
      const ArenaScope inner(arena);
      arena.allocate_bytes(128);
    }
    EXPECT_EQ(arena.used(), 64u);
  }
  EXPECT_EQ(arena.used(), 0u);
  EXPECT_EQ(arena.peak(), 192u);
  EXPECT_EQ(arena.capacity(), 1024u);
  EXPECT_THROW(arena.release_to(1), InternalError);
}

TEST(Arena, ScopesGiveBackWhenAnExceptionPasses) {
  Arena arena(128);
  EXPECT_THROW(
      {
        const ArenaScope scope(arena);
        arena.allocate_bytes(129);
      },
      InternalError);
  EXPECT_EQ(arena.used(), 0u);
  EXPECT_NE(arena.allocate_bytes(128), nullptr);
}

TEST(Arena, AFullOneSaysHowMuchWasAsked) {
  Arena arena(128);
  arena.allocate_bytes(64);
  try {
    arena.allocate_bytes(100);
    FAIL();
  } catch (const InternalError& error) {
    EXPECT_NE(std::string(error.what()).find("128 bytes: 64 used, 100 more"), std::string::npos) << error.what();
  }
}

TEST(Buffer, IsZeroAndAlignedAndMoves) {
  Buffer buffer(1000);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer.data()) % kAlignment, 0u);
  for (std::size_t i = 0; i < buffer.size(); ++i) ASSERT_EQ(buffer.data()[i], std::byte{0});
  const std::byte* data = buffer.data();
  const Buffer moved = std::move(buffer);
  EXPECT_EQ(moved.data(), data);
  EXPECT_EQ(moved.size(), 1000u);
  EXPECT_THROW(Buffer(std::size_t{1} << 62), Error);
}

}  // namespace
}  // namespace tessera
