// The order in which Blackwell's tensor cores (tcgen05.mma with block scaling) and cuBLASLt (VEC32_UE8M0) read the
// scales of an MXFP8 matrix: tiles of 128 rows × 4 scales, 512 bytes each, row-major; within a tile the scales of rows
// r, r + 32, r + 64 and r + 96 lie together.
#pragma once

#include <cstdint>

#include "mx/formats.h"

namespace tessera::mx {

inline constexpr std::int64_t kTileRows = 128, kTileScales = 4;

/// Place of the scale of row r, block c in the packed scales of a matrix with `blocks` blocks per row.
TESSERA_HOST_DEVICE constexpr std::int64_t packed_scale_offset(std::int64_t r, std::int64_t c, std::int64_t blocks) {
  const std::int64_t tiles_per_row = (blocks + kTileScales - 1) / kTileScales;
  return (r / kTileRows * tiles_per_row + c / kTileScales) * (kTileRows * kTileScales) + r % 32 * 16 +
         r % kTileRows / 32 * 4 + c % kTileScales;
}

/// Bytes of the packed scales: whole tiles.
TESSERA_HOST_DEVICE constexpr std::int64_t packed_scale_bytes(std::int64_t rows, std::int64_t blocks) {
  return (rows + kTileRows - 1) / kTileRows * ((blocks + kTileScales - 1) / kTileScales) * (kTileRows * kTileScales);
}

// Groups of a matrix (the experts of a grouped GEMM) are packed each as a matrix of its own, so that none shares a tile
// with the next. Along either dim a tile holds the scales of 128 numbers: 128 rows, or 4 blocks of 32.

/// The tile, counted along the grouped dim, at which a group's tiles begin: group `group` of numbers [offset, next
/// group's offset). No group reaches into the next one's tiles, whatever their sizes, and no prefix sum is needed.
TESSERA_HOST_DEVICE constexpr std::int64_t packed_group_tile(std::int64_t offset, std::int64_t group) {
  return offset / kTileRows + group;
}

/// Tiles along the grouped dim for all groups of a dim of so many numbers.
TESSERA_HOST_DEVICE constexpr std::int64_t packed_group_tiles(std::int64_t size, std::int64_t num_groups) {
  return packed_group_tile(size, num_groups);
}

/// Bytes of packed scales per tile along the grouped dim, where the other dim has so many numbers.
TESSERA_HOST_DEVICE constexpr std::int64_t packed_bytes_per_tile(std::int64_t size) {
  return packed_scale_bytes(size, kTileScales);
}

/// packed [packed_scale_bytes(rows, blocks)] from scales [rows, blocks]; 0 where there is no scale.
inline void pack_scales(const std::uint8_t* scales, std::int64_t rows, std::int64_t blocks, std::uint8_t* packed) {
  for (std::int64_t i = 0; i < packed_scale_bytes(rows, blocks); ++i) packed[i] = 0;
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < blocks; ++c) packed[packed_scale_offset(r, c, blocks)] = scales[r * blocks + c];
  }
}

/// The inverse.
inline void unpack_scales(const std::uint8_t* packed, std::int64_t rows, std::int64_t blocks, std::uint8_t* scales) {
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < blocks; ++c) scales[r * blocks + c] = packed[packed_scale_offset(r, c, blocks)];
  }
}

}  // namespace tessera::mx
