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
