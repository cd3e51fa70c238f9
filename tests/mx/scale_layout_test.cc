#include "mx/scale_layout.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace tessera::mx {
namespace {

// Worked out by hand: (row, block) of a matrix with 8 blocks per row. A row has 256 numbers, so 128 rows have two
// tiles.
static_assert(packed_scale_offset(0, 0, 8) == 0);
static_assert(packed_scale_offset(0, 3, 8) == 3);
static_assert(packed_scale_offset(1, 0, 8) == 16);      // the next row is 16 bytes further on
static_assert(packed_scale_offset(32, 0, 8) == 4);      // row 32 lies beside row 0
static_assert(packed_scale_offset(127, 3, 8) == 511);   // the last scale of the tile
static_assert(packed_scale_offset(0, 4, 8) == 512);     // the next tile to the right
static_assert(packed_scale_offset(128, 0, 8) == 1024);  // the next tile below
static_assert(packed_scale_offset(130, 5, 8) == 3 * 512 + 2 * 16 + 1);
static_assert(packed_scale_offset(128, 0, 5) == 1024);  // an incomplete tile takes a whole one
static_assert(packed_scale_offset(128, 0, 4) == 512);
static_assert(packed_scale_bytes(1, 1) == 512 && packed_scale_bytes(128, 4) == 512);
static_assert(packed_scale_bytes(129, 4) == 1024 && packed_scale_bytes(128, 5) == 1024);
static_assert(packed_scale_bytes(0, 4) == 0 && packed_scale_bytes(256, 64) == 256 * 64);

const std::vector<std::pair<std::int64_t, std::int64_t>> kSizes = {
    {1, 1}, {1, 4}, {31, 3}, {32, 4}, {33, 5}, {127, 7}, {128, 8}, {129, 9}, {160, 64}, {256, 12}, {300, 17}, {0, 4}};

// Tests the formula as cuBLAS's documentation gives it, with K numbers in a row: C4 = ceil(K / 128).
TEST(ScaleLayout, Formula) {
  for (const auto& [rows, blocks] : kSizes) {
    const std::int64_t k = blocks * 32 - 5, c4 = (k + 127) / 128;
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t c = 0; c < blocks; ++c) {
        ASSERT_EQ(packed_scale_offset(r, c, blocks),
                  ((r / 128) * c4 + c / 4) * 512 + (r % 32) * 16 + ((r % 128) / 32) * 4 + c % 4);
      }
    }
  }
}

TEST(ScaleLayout, EachScaleHasItsPlaceAndTheRestIsZero) {
  for (const auto& [rows, blocks] : kSizes) {
    const std::int64_t bytes = packed_scale_bytes(rows, blocks);
    std::vector<int> used(bytes);
    std::vector<std::uint8_t> scales(rows * blocks);
    for (std::int64_t i = 0; i < rows * blocks; ++i) scales[i] = static_cast<std::uint8_t>(1 + i * 37 % 255);  // no 0
    std::vector<std::uint8_t> packed(bytes, 0xAA);
    pack_scales(scales.data(), rows, blocks, packed.data());
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t c = 0; c < blocks; ++c) {
        const std::int64_t at = packed_scale_offset(r, c, blocks);
        ASSERT_TRUE(at >= 0 && at < bytes);
        ++used[at];
        ASSERT_EQ(packed[at], scales[r * blocks + c]);
      }
    }
    for (std::int64_t at = 0; at < bytes; ++at) {
      ASSERT_LE(used[at], 1);
      ASSERT_TRUE(used[at] == 1 || packed[at] == 0);
    }
    std::vector<std::uint8_t> unpacked(scales.size(), 0x55);
    unpack_scales(packed.data(), rows, blocks, unpacked.data());
    EXPECT_EQ(unpacked, scales);
  }
}

// The size counts whole tiles, and so the padding of an expert's group that does not fill its tiles.
TEST(ScaleLayout, PackedSizeCountsWholeTiles) {
  for (const auto& [rows, blocks] : kSizes) {
    const std::int64_t tiles = ((rows + 127) / 128) * ((blocks + 3) / 4);
    EXPECT_EQ(packed_scale_bytes(rows, blocks), tiles * 512);
  }
}

// Compares a tile with cuBLAS's documentation, byte by byte.
TEST(ScaleLayout, Tile) {
  for (std::int64_t r = 0; r < kTileRows; ++r) {
    for (std::int64_t c = 0; c < kTileScales; ++c) {
      EXPECT_EQ(packed_scale_offset(r, c, kTileScales), r % 32 * 16 + r / 32 % 4 * 4 + c % 4);
    }
  }
}

// Whatever the sizes of the groups, their tiles follow each other without sharing one, and fit.
TEST(ScaleLayout, GroupsHaveTheirOwnTiles) {
  for (const std::vector<std::int64_t>& offsets : std::vector<std::vector<std::int64_t>>{{0, 0},
                                                                                         {0, 1, 2, 3},
                                                                                         {0, 127, 254, 255, 256},
                                                                                         {0, 0, 128, 128, 256, 256},
                                                                                         {1, 129, 130, 386, 513},
                                                                                         {0, 32, 160, 256, 288},
                                                                                         {100, 100, 1000, 1999}}) {
    const auto num_groups = static_cast<std::int64_t>(offsets.size()) - 1;
    std::int64_t end = 0;
    for (std::int64_t group = 0; group < num_groups; ++group) {
      const std::int64_t first = packed_group_tile(offsets[group], group);
      EXPECT_GE(first, end);
      end = first + (offsets[group + 1] - offsets[group] + kTileRows - 1) / kTileRows;
    }
    EXPECT_LE(end, packed_group_tiles(offsets.back(), num_groups));
  }
  EXPECT_EQ(packed_bytes_per_tile(128), 512);
  EXPECT_EQ(packed_bytes_per_tile(416), 4 * 512);
}

}  // namespace
}  // namespace tessera::mx
