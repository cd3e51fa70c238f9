// Packs the E8M0 scales of MXFP8 for Blackwell's tensor cores (mx/scale_layout.h). The input is row-major, as in
// mx/quantized.h. Each group gets separate tiles. Positions without a scale become 0.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "mx/block.h"
#include "mx/scale_layout.h"

namespace tessera::cuda {

/// Returns the number of blocks of `size` numbers along the contraction.
TESSERA_HOST_DEVICE constexpr std::int64_t num_blocks(std::int64_t size) {
  return (size + mx::kBlock - 1) / mx::kBlock;
}

struct PackScales {
  const std::uint8_t* scales = nullptr;  // [num_rows, ceil(num_columns / 32)]
  std::int64_t num_rows = 0, num_columns = 0;
  /// If true, groups consist of columns and begin at multiples of 32. Otherwise they consist of rows.
  bool groups_of_columns = false;
  std::int64_t num_groups = 1;
  /// The begin of each group and the end of the last one, on the device. If it is null, all groups have the same size.
  const std::int32_t* offsets = nullptr;
  std::uint8_t* packed = nullptr;  // [bytes()], at an address that is a multiple of 16

  TESSERA_HOST_DEVICE std::int64_t grouped_size() const { return groups_of_columns ? num_columns : num_rows; }
  TESSERA_HOST_DEVICE std::int64_t bytes_per_tile() const {
    return mx::packed_bytes_per_tile(groups_of_columns ? num_rows : num_columns);
  }
  TESSERA_HOST_DEVICE std::int64_t bytes() const {
    return mx::packed_group_tiles(grouped_size(), num_groups) * bytes_per_tile();
  }
  TESSERA_HOST_DEVICE std::int64_t group_begin(std::int64_t group) const {
    return offsets == nullptr ? grouped_size() / num_groups * group : std::int64_t{offsets[group]};
  }
  /// Returns the number of words in which a row is read. A word is the four scales that a tile has of a row.
  TESSERA_HOST_DEVICE std::int64_t words_per_row() const {
    return groups_of_columns ? mx::packed_group_tiles(num_columns, num_groups)
                             : (num_blocks(num_columns) + mx::kTileScales - 1) / mx::kTileScales;
  }
};

/// Packs the scales on `stream`. Throws InternalError if groups without offsets cannot have one size.
void pack_scales(const PackScales& args, cudaStream_t stream);

/// Packs word `word` of row `row`, if it belongs to a group. One thread executes it. `packed` must be 0 before.
TESSERA_HOST_DEVICE inline void pack_scales_word(const PackScales& args, std::int64_t row, std::int64_t word) {
  // Find the last group that does not begin after the row, or after the word's tile.
  const auto begins_beyond = [&](std::int64_t g) {
    const std::int64_t begin = args.group_begin(g);
    return args.groups_of_columns ? mx::packed_group_tile(begin, g) > word : begin > row;
  };
  std::int64_t group = -1, next = args.num_groups;
  while (next - group > 1) {
    const std::int64_t middle = (group + next) / 2;
    (begins_beyond(middle) ? next : group) = middle;
  }
  if (group < 0) return;
  const std::int64_t begin = args.group_begin(group), end = args.group_begin(group + 1);
  const std::int64_t first_tile = mx::packed_group_tile(begin, group), blocks = num_blocks(args.num_columns);
  // The group's own matrix begins at (first_row, first_block), and has group_blocks blocks per row.
  const std::int64_t first_row = args.groups_of_columns ? 0 : begin,
                     first_block = args.groups_of_columns ? begin / mx::kBlock : 0;
  const std::int64_t group_blocks = args.groups_of_columns ? num_blocks(end) - first_block : blocks;
  const std::int64_t block = (args.groups_of_columns ? word - first_tile : word) * mx::kTileScales;
  if (block >= group_blocks || (!args.groups_of_columns && row >= end)) return;
  const std::uint8_t* from = args.scales + row * blocks + first_block + block;
  uchar4 scales = {from[0], 0, 0, 0};
  if (block + 1 < group_blocks) scales.y = from[1];
  if (block + 2 < group_blocks) scales.z = from[2];
  if (block + 3 < group_blocks) scales.w = from[3];
  *reinterpret_cast<uchar4*>(args.packed + first_tile * args.bytes_per_tile() +
                             mx::packed_scale_offset(row - first_row, block, group_blocks)) = scales;
}

}  // namespace tessera::cuda
