// The order in which Blackwell's tensor cores (tcgen05.mma with block scaling) and cuBLASLt (VEC32_UE8M0) read the
// scales of an MXFP8 matrix. The scales form tiles of 128 rows × 4 scales, 512 bytes each, row-major. Within a tile the
// scales of rows r, r + 32, r + 64 and r + 96 lie together. docs/mxfp8.md has the formula and its sources.
#pragma once

#include <cstdint>

#include "mx/formats.h"

namespace tessera::mx {

inline constexpr std::int64_t kTileRows = 128, kTileScales = 4;

/// Returns the position of the scale of row r and block c in the packed scales of a matrix with `blocks` blocks per
/// row.
TESSERA_HOST_DEVICE constexpr std::int64_t packed_scale_offset(std::int64_t r, std::int64_t c, std::int64_t blocks) {
  const std::int64_t tiles_per_row = (blocks + kTileScales - 1) / kTileScales;
  return (r / kTileRows * tiles_per_row + c / kTileScales) * (kTileRows * kTileScales) + r % 32 * 16 +
         r % kTileRows / 32 * 4 + c % kTileScales;
}

/// Returns the size of the packed scales in bytes, rounded up to whole tiles.
TESSERA_HOST_DEVICE constexpr std::int64_t packed_scale_bytes(std::int64_t rows, std::int64_t blocks) {
  return (rows + kTileRows - 1) / kTileRows * ((blocks + kTileScales - 1) / kTileScales) * (kTileRows * kTileScales);
}

// The groups of a matrix (the experts of a grouped GEMM) are each packed as a separate matrix, so no two share a tile.
// Along either dim a tile holds the scales of 128 numbers: 128 rows, or 4 blocks of 32.

/// Returns the first tile, counted along the grouped dim, of group `group`, which begins at number `offset` of that
/// dim. Groups of any size get separate tiles, and no prefix sum is needed.
TESSERA_HOST_DEVICE constexpr std::int64_t packed_group_tile(std::int64_t offset, std::int64_t group) {
  return offset / kTileRows + group;
}

/// Returns the number of tiles along a grouped dim of `size` numbers, for all groups.
TESSERA_HOST_DEVICE constexpr std::int64_t packed_group_tiles(std::int64_t size, std::int64_t num_groups) {
  return packed_group_tile(size, num_groups);
}

/// Returns the bytes of packed scales per tile along the grouped dim, if the other dim has `size` numbers.
TESSERA_HOST_DEVICE constexpr std::int64_t packed_bytes_per_tile(std::int64_t size) {
  return packed_scale_bytes(size, kTileScales);
}

/// Writes packed [packed_scale_bytes(rows, blocks)] from scales [rows, blocks], with 0 where there is no scale.
inline void pack_scales(const std::uint8_t* scales, std::int64_t rows, std::int64_t blocks, std::uint8_t* packed) {
  for (std::int64_t i = 0; i < packed_scale_bytes(rows, blocks); ++i) packed[i] = 0;
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < blocks; ++c) packed[packed_scale_offset(r, c, blocks)] = scales[r * blocks + c];
  }
}

/// Writes scales [rows, blocks] from packed [packed_scale_bytes(rows, blocks)].
inline void unpack_scales(const std::uint8_t* packed, std::int64_t rows, std::int64_t blocks, std::uint8_t* scales) {
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < blocks; ++c) scales[r * blocks + c] = packed[packed_scale_offset(r, c, blocks)];
  }
}

}  // namespace tessera::mx
