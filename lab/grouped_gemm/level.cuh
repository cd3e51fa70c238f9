// What the levels of the course share: the product that they compute, and how a block finds its rows.
//
// Each level computes y_RM = x_RN · w_EMN[e]ᵀ in bfloat16 with float32 sums. Rows [offsets[e], offsets[e + 1]) belong
// to expert e. The offsets are on the device, so the host knows neither the groups nor the number of tiles.
// Predictions are for 8 experts, 98,304 rows, N = 2048 and M = 1408 ("the shape") on an H200.
#pragma once

#include <cstdint>

#include "ops/gemm/sm90/sm90_grouped_gemm.h"
#include "ops/gemm/sm90/sm90_grouped_schedule.cuh"
#include "ops/kit/ptx.cuh"
#include "ops/kit/tensor_map.h"

namespace lab {

using Forward = tessera::cuda::Sm90GroupedForward;
using Bf16 = __nv_bfloat16;
using tessera::cuda::sm90::ceil_div;
namespace ptx = tessera::ptx;

void forward_1_naive(const Forward& args, cudaStream_t stream);
void forward_2_shared_tiles(const Forward& args, cudaStream_t stream);
void forward_3_wgmma(const Forward& args, cudaStream_t stream);
void forward_4_ring(const Forward& args, cudaStream_t stream);
void forward_5_persistent_clusters(const Forward& args, cudaStream_t stream);

// --- Which rows a block computes -----------------------------------------------------------------------------------

struct RowTile {
  int expert = -1;           // -1: there is no such tile
  int row = 0, row_end = 0;  // the tile's first row, and the end of the expert's rows
};

/// Returns row tile `index`, counted over all experts. A tile has rows of one expert only.
__host__ __device__ inline RowTile find_row_tile(const std::int32_t* offsets_E1, int num_experts, int index,
                                                 int tile_rows) {
  for (int e = 0; e < num_experts; ++e) {
    const int begin = offsets_E1[e], end = offsets_E1[e + 1], tiles = ceil_div(end - begin, tile_rows);
    if (index < tiles) return {e, begin + index * tile_rows, end};
    index -= tiles;
  }
  return {};
}

/// Returns the most row tiles that any offsets give. Blocks that find no tile end at once.
inline int most_row_tiles(const Forward& args, int tile_rows) { return args.num_rows / tile_rows + args.num_experts; }

struct Tile {
  RowTile rows;
  int column = 0;
};

/// Walks tiles `first`, `first + stride`, … of all experts' tiles, columns first. Every thread that needs the list has
/// one of its own.
class TileList {
 public:
  __host__ __device__ TileList(const std::int32_t* offsets_E1, int num_experts, int columns, int tile_rows,
                               int tile_columns, int first, int stride)
      : offsets_E1_(offsets_E1),
        num_experts_(num_experts),
        tile_rows_(tile_rows),
        tile_columns_(tile_columns),
        column_tiles_(ceil_div(columns, tile_columns)),
        stride_(stride),
        next_(first) {}

  __host__ __device__ bool next(Tile& tile) {
    for (; expert_ < num_experts_; ++expert_) {
      const int begin = offsets_E1_[expert_], end = offsets_E1_[expert_ + 1];
      const int tiles = ceil_div(end - begin, tile_rows_) * column_tiles_;
      if (next_ < tiles) {
        tile = {{expert_, begin + next_ / column_tiles_ * tile_rows_, end}, next_ % column_tiles_ * tile_columns_};
        next_ += stride_;
        return true;
      }
      next_ -= tiles;
    }
    return false;
  }

 private:
  const std::int32_t* offsets_E1_;
  int num_experts_, tile_rows_, tile_columns_, column_tiles_, stride_;
  int next_, expert_ = 0;  // `next_` counts from the first tile of the expert
};

// --- Operands of TMA -----------------------------------------------------------------------------------------------

/// Describes a bfloat16 operand [experts, rows, columns], or [rows, columns] if `experts` is 0. A copy takes box_rows ×
/// 64 numbers, and swizzles rows of 128 bytes as WGMMA reads them.
inline CUtensorMap operand_map(const Bf16* data, int experts, int rows, int columns, int box_rows) {
  tessera::cuda::TensorMapSpec spec{.data = data, .rank = experts == 0 ? 2 : 3};
  spec.sizes[0] = columns;
  spec.sizes[1] = rows;
  spec.sizes[2] = experts;
  spec.strides_bytes[0] = std::uint64_t{2} * columns;
  spec.strides_bytes[1] = spec.strides_bytes[0] * rows;
  spec.box[0] = 64;
  spec.box[1] = box_rows;
  return tessera::cuda::make_tensor_map(spec);
}

}  // namespace lab
