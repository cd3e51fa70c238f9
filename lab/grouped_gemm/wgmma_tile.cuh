// One step of WGMMA on a tile of 128 × 256, and the way of its sums to memory. Levels 3 to 5 share it.
#pragma once

#include <cstddef>

#include "device/cuda_check.h"
#include "level.cuh"
#include "ops/gemm/sm90/sm90_fragments.cuh"

namespace lab {

inline constexpr int kTileRows = 128, kTileColumns = 256, kStepK = 64;
inline constexpr int kOperandRowBytes = kStepK * sizeof(Bf16);  // 128, the width of the swizzle

/// The operands of a step: rows of 64 numbers, as TMA writes them with the 128-byte swizzle.
struct alignas(1024) OperandTiles {
  std::byte x[kTileRows * kOperandRowBytes];
  std::byte w[kTileColumns * kOperandRowBytes];
};

/// Starts to multiply a step for one of two warpgroups, which has 64 of the tile's rows. WGMMA takes 16 numbers along K
/// at a time, so it takes four instructions.
__device__ inline void multiply(float (&d)[128], const OperandTiles& tiles, int warpgroup, bool accumulate) {
  constexpr int kInstructionBytes = 16 * sizeof(Bf16);
  const std::uint64_t x = ptx::wgmma_descriptor<ptx::Major::kK>(tiles.x + warpgroup * 64 * kOperandRowBytes);
  const std::uint64_t w = ptx::wgmma_descriptor<ptx::Major::kK>(tiles.w);
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < kStepK / 16; ++i) {
    ptx::Wgmma<kTileColumns>::bf16<ptx::Major::kK, ptx::Major::kK>(d, ptx::advance_descriptor(x, i * kInstructionBytes),
                                                                   ptx::advance_descriptor(w, i * kInstructionBytes),
                                                                   accumulate || i > 0);
  }
  ptx::wgmma_commit();
}

/// Writes a warpgroup's 64 rows of a tile. It leaves out rows of other experts and columns beyond the last.
__device__ inline void store_tile(const float (&d)[128], const Forward& p, const RowTile& tile, int column,
                                  int warpgroup, tessera::cuda::sm90::WarpBuffer& buffer) {
  const int row = tile.row + 64 * warpgroup;
  tessera::cuda::sm90::store_rows(d, p.y_RM + std::int64_t{row} * p.m + column, p.m, tile.row_end - row, p.m - column,
                                  buffer);
}

/// Launches a block of `threads` threads per tile. Levels 3 and 4 share it.
template <auto kKernel, typename Shared>
void launch_per_tile(int threads, const Forward& args, cudaStream_t stream) {
  const CUtensorMap x = operand_map(args.x_RN, 0, args.num_rows, args.n, kTileRows);
  const CUtensorMap w = operand_map(args.w_EMN, args.num_experts, args.m, args.n, kTileColumns);
  TESSERA_CUDA(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared)));
  const dim3 grid(ceil_div(args.m, kTileColumns), most_row_tiles(args, kTileRows));
  kKernel<<<grid, threads, sizeof(Shared), stream>>>(x, w, args);
}

}  // namespace lab
