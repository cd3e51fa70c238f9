// Level 2: tiles in shared memory, and blocks of outputs in registers.
//
// The idea. A block computes 128 × 128 outputs. Its threads copy 16 numbers along K of all their rows and columns to
// shared memory, once for all. Each thread computes 8 × 8 outputs: it loads 16 numbers from shared memory for 64
// products, where level 1 loads 128. So the CUDA cores, not the loads, should become what limits.
//
// What must be spent. Floats of CUDA cores: 132 SMs · 128 products · 1.98 GHz = 67 TFLOP/s at most, so 8.5 ms. The
// blocks read 256 rows · N · 2 bytes each, 8.9 GB in all, mostly from the L2 cache: about 2 ms. Shared memory: a warp's
// 64 products per lane take 6 cycles of loads, and its quarter of the SM 64 cycles of products.
//
// What limits it. CUDA cores, and the barriers around each copy. Two blocks per SM fill each other's gaps. The lanes
// load 16 bytes each from different rows, and half of each sector is left for another warp to find in the L1 cache.
//
// Predicted: 40 TFLOP/s, 60 % of what CUDA cores can, 4 % of the floor's rate.
#include "level.cuh"

namespace lab {
namespace {

constexpr int kTile = 128, kStepK = 16, kThreads = 256;
constexpr int kPerLoad = 8;  // numbers of a 16-byte load

struct Shared {
  float x[kStepK][kTile], w[kStepK][kTile];
};

/// Copies 128 rows × 16 k of `from` to shared memory, with zeros beyond `rows` and n. It transposes them, so that
/// neighbouring rows are neighbours.
__device__ void load_tile(float (&to)[kStepK][kTile], const Bf16* from, int rows, int n, int k) {
  const int row = threadIdx.x % kTile, first = threadIdx.x / kTile * kPerLoad;
  uint4 loaded{};
  // n is a multiple of 8, so the 8 numbers lie all inside or all outside.
  if (row < rows && k + first < n) {
    loaded = *reinterpret_cast<const uint4*>(from + std::int64_t{row} * n + k + first);
  }
  const unsigned pairs[kPerLoad / 2] = {loaded.x, loaded.y, loaded.z, loaded.w};
#pragma unroll
  for (int i = 0; i < kPerLoad / 2; ++i) {  // a bfloat16 is the upper half of a float
    to[first + 2 * i][row] = __uint_as_float(pairs[i] << 16);
    to[first + 2 * i + 1][row] = __uint_as_float(pairs[i] & 0xffff0000);
  }
}

/// Loads numbers first … first + 3 and 64 + first … 64 + first + 3.
__device__ void load_eight(float (&to)[8], const float (&from)[kTile], int first) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float4 four = *reinterpret_cast<const float4*>(from + half * (kTile / 2) + first);
    to[4 * half] = four.x;
    to[4 * half + 1] = four.y;
    to[4 * half + 2] = four.z;
    to[4 * half + 3] = four.w;
  }
}

__global__ void __launch_bounds__(kThreads, 2) shared_tiles(Forward p) {
  __shared__ __align__(16) Shared shared;
  const RowTile tile = find_row_tile(p.offsets_E1, p.num_experts, blockIdx.y, kTile);
  if (tile.expert < 0) return;
  const int column = blockIdx.x * kTile;
  const int first_row = threadIdx.x / 16 * 4, first_column = threadIdx.x % 16 * 4;
  const Bf16* x = p.x_RN + std::int64_t{tile.row} * p.n;
  const Bf16* w = p.w_EMN + (std::int64_t{tile.expert} * p.m + column) * p.n;
  float sums[8][8] = {};
  for (int k = 0; k < p.n; k += kStepK) {
    load_tile(shared.x, x, tile.row_end - tile.row, p.n, k);
    load_tile(shared.w, w, p.m - column, p.n, k);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kStepK; ++i) {
      float a[8], b[8];
      load_eight(a, shared.x[i], first_row);
      load_eight(b, shared.w[i], first_column);
#pragma unroll
      for (int r = 0; r < 8; ++r) {
#pragma unroll
        for (int c = 0; c < 8; ++c) sums[r][c] += a[r] * b[c];
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int r = 0; r < 8; ++r) {
    const int row = tile.row + first_row + r / 4 * (kTile / 2) + r % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = column + first_column + half * (kTile / 2);
      if (row >= tile.row_end || at >= p.m) continue;
      const float* four = sums[r] + 4 * half;
      *reinterpret_cast<uint2*>(p.y_RM + std::int64_t{row} * p.m + at) =
          uint2{ptx::pack_bf16(four[0], four[1]), ptx::pack_bf16(four[2], four[3])};
    }
  }
}

}  // namespace

void forward_2_shared_tiles(const Forward& args, cudaStream_t stream) {
  const dim3 grid(ceil_div(args.m, kTile), most_row_tiles(args, kTile));
  shared_tiles<<<grid, kThreads, 0, stream>>>(args);
}

}  // namespace lab
