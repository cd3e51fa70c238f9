// Attention of new tokens over a cache of latents on tensor cores, for bfloat16. A block reads a tile of the cache once
// for 16 heads, which are the rows of an mma instruction (PTX ISA: mma.m16n8k16, ldmatrix). The cache's rows are both
// the keys and the values. A second kernel merges what the blocks have summed, and multiplies it by W_v.
#pragma once

#include <cuda_pipeline.h>

#include "ops/attention/cache_places.cuh"
#include "ops/attention/mla_decode.h"
#include "ops/kit/dots.cuh"
#include "ops/kit/ptx.cuh"

namespace tessera::cuda {

namespace decode_tiles {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;
constexpr int kHeads = 16;          // heads of a block
constexpr int kTile = kWarp;        // positions that a block takes at a time: a lane weighs one
constexpr int kMostBlocks = kWarp;  // that share a text's tiles: a lane merges one
constexpr int kStages = 2;          // tiles in shared memory
constexpr int kPad = 8;             // after a row in shared memory: then 8 rows' 16 bytes are in different banks
constexpr int kQuarters = 4;        // the warps that share a score's sum
constexpr int kAtOnce = 3;          // mma steps whose operands a warp loads before it uses the first
constexpr int kColumns = 16;        // numbers of the latent that a warp adds up at a time
constexpr int kMostGroups = 4;      // the most groups of kColumns that a warp has
constexpr int kScorePitch = kTile + 4, kWeightPitch = kTile + kPad;

/// Returns how far apart rows lie in shared memory.
__host__ __device__ inline int pitch_of(const MlaDecodeDims& dims) {
  return static_cast<int>(dims.dim_latent + dims.dim_rope) + kPad;
}

/// Per head: the largest score of a block's positions, and the sum of the weights relative to exp(largest). The sum is
/// 0 without positions. If a score is NaN, so is the sum, though `largest` ignores it.
struct Totals {
  float largest, total;
};

/// Returns what a sum of weights relative to exp(from) is multiplied by, so that it becomes relative to exp(to).
/// Without positions `total` is 0, and so is the factor.
__device__ inline float rescaling(float total, float from, float to) { return total == 0.0f ? 0.0f : expf(from - to); }

struct Args {
  MlaDecodeDims dims;
  const __nv_bfloat16 *q, *q_latent, *cache, *wkv_b;
  CachePlaces places;
  int num_blocks;    // per text and kHeads heads
  float* sums;       // [T, H, num_blocks, C]: weighted latents, relative to exp(largest)
  Totals* totals;    // [T, H, num_blocks]
  __nv_bfloat16* o;  // [T, H · v]

  __host__ __device__ int latent() const { return static_cast<int>(dims.dim_latent); }
  __device__ int row() const { return static_cast<int>(dims.dim_latent + dims.dim_rope); }
  __device__ int pitch() const { return pitch_of(dims); }
  /// Returns the place of a block's sums and totals.
  __device__ std::int64_t part(std::int64_t token, std::int64_t head, int block) const {
    return (token * dims.num_heads + head) * num_blocks + block;
  }
};

/// What a block keeps in shared memory.
struct Shared {
  __nv_bfloat16* keys;     // [kStages, kTile, pitch]
  __nv_bfloat16* queries;  // [kHeads, pitch]
  float* scores;           // [kQuarters, kHeads, kScorePitch]
  __nv_bfloat16* weights;  // [kHeads, kWeightPitch]
  float* factors;          // [kHeads]: what older sums must be multiplied by
  Totals* totals;          // [kHeads]

  __device__ Shared(std::byte* memory, int pitch) {
    keys = reinterpret_cast<__nv_bfloat16*>(memory);
    queries = keys + kStages * kTile * pitch;
    scores = reinterpret_cast<float*>(queries + kHeads * pitch);
    weights = reinterpret_cast<__nv_bfloat16*>(scores + kQuarters * kHeads * kScorePitch);
    factors = reinterpret_cast<float*>(weights + kHeads * kWeightPitch);
    totals = reinterpret_cast<Totals*>(factors + kHeads);
  }
  static std::size_t bytes(int pitch) {
    return ((kStages * kTile + kHeads) * static_cast<std::size_t>(pitch) + kHeads * kWeightPitch) *
               sizeof(__nv_bfloat16) +
           kHeads * (kQuarters * kScorePitch * sizeof(float) + sizeof(float) + sizeof(Totals));
  }
};

/// Returns true if the kernels below take these sizes.
inline bool takes(const MlaDecodeDims& dims) {
  return dims.dim_latent % (kWarps * kColumns) == 0 && dims.dim_latent <= kWarps * kColumns * kMostGroups &&
         (dims.dim_latent + dims.dim_rope) % (kQuarters * 16) == 0 && dims.dim_nope % kLanes == 0 &&
         dims.dim_v % kLanes == 0 && Shared::bytes(pitch_of(dims)) <= kMostDynamicShared;
}

/// Starts to copy the numbers [first, end) of a row of the cache or of the queries to shared memory, by a warp. `from`
/// has the first of them, and `to` is the row's begin. If the row does not exist, they become zeros.
__device__ inline void copy_row(const __nv_bfloat16* from, int first, int end, bool exists, __nv_bfloat16* to) {
  for (int i = first + static_cast<int>(threadIdx.x) % kWarp * kLanes; i < end; i += kWarp * kLanes) {
    __pipeline_memcpy_async(to + i, from + (i - first), 16, exists ? 0 : 16);
  }
}

constexpr std::int64_t kNone = -1;

/// Starts to copy rows [first, first + kTile) of a text, except row `skipped`. kNone skips no row. Rows from `end` on
/// become zeros.
__device__ inline void load_tile(const Args& args, const __nv_bfloat16* text, std::int64_t first, std::int64_t end,
                                 std::int64_t skipped, __nv_bfloat16* tile) {
#pragma unroll
  for (int i = 0; i < kTile / kWarps; ++i) {
    const int r = i * kWarps + static_cast<int>(threadIdx.x) / kWarp;
    const bool exists = first + r < end;
    if (first + r == skipped) continue;
    copy_row(text + (exists ? (first + r) * args.row() : 0), 0, args.row(), exists, tile + r * args.pitch());
  }
}

/// Starts to copy the queries of a block's heads. Those of heads that do not exist are zeros.
__device__ inline void load_queries(const Args& args, std::int64_t token, std::int64_t first_head,
                                    __nv_bfloat16* queries) {
  const std::int64_t num_heads = args.dims.num_heads, q_head = args.dims.dim_nope + args.dims.dim_rope;
#pragma unroll
  for (int i = 0; i < kHeads / kWarps; ++i) {
    const int h = i * kWarps + static_cast<int>(threadIdx.x) / kWarp;
    const bool exists = first_head + h < num_heads;
    const std::int64_t head = token * num_heads + (exists ? first_head + h : 0);
    __nv_bfloat16* const to = queries + h * args.pitch();
    copy_row(args.q_latent + head * args.latent(), 0, args.latent(), exists, to);
    copy_row(args.q + head * q_head + args.dims.dim_nope, args.latent(), args.row(), exists, to);
  }
}

/// Computes a quarter of the sums of 16 positions' scores per warp.
__device__ inline void score(const Args& args, const Shared& shared, const __nv_bfloat16* tile) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, pitch = args.pitch();
  const int quarter = warp % kQuarters, length = args.row() / kQuarters, first_position = warp / kQuarters * 16;
  const __nv_bfloat16* const a_at = shared.queries + lane % 16 * pitch + lane / 16 * 8 + quarter * length;
  const __nv_bfloat16* const b_at =
      tile + (first_position + lane / 16 * 8 + lane % 8) * pitch + lane / 8 % 2 * 8 + quarter * length;
  float sums[2][4] = {};
  for (int first = 0; first < length; first += kAtOnce * 16) {
    // The matrices of 8 × 8 of a step: a has heads 0-7 and 8-15 at k, then both at k + 8. b has positions 0-7 at k and
    // at k + 8, then positions 8-15.
    std::uint32_t a[kAtOnce][4], b[kAtOnce][4];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int k = first + i * 16;
      if (k >= length) continue;
      ptx::load_matrices<false>(a_at + k, a[i]);
      ptx::load_matrices<false>(b_at + k, b[i]);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i * 16 >= length) continue;
      ptx::multiply_add(a[i], b[i][0], b[i][1], sums[0]);
      ptx::multiply_add(a[i], b[i][2], b[i][3], sums[1]);
    }
  }
  float* const at = shared.scores + (quarter * kHeads + lane / 4) * kScorePitch + first_position + lane % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < 4; ++i) at[i / 2 * 8 * kScorePitch + half * 8 + i % 2] = sums[half][i];
  }
}

/// Turns the scores of the tile's first `count` positions into weights relative to exp(largest), and updates the totals
/// and factors. A warp has a head at a time.
__device__ inline void weigh(const Args& args, const Shared& shared, std::int64_t count) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int i = 0; i < kHeads / kWarps; ++i) {
    const int h = i * kWarps + static_cast<int>(threadIdx.x) / kWarp;
    float score = 0.0f;
#pragma unroll
    for (int quarter = 0; quarter < kQuarters; ++quarter) {
      score += shared.scores[(quarter * kHeads + h) * kScorePitch + lane];
    }
    const bool exists = lane < count;
    score = exists ? score * args.dims.scale : -INFINITY;
    const Totals before = shared.totals[h];
    const float larger = max_of_warp(fmaxf(before.largest, score));
    const auto weight = from_float<__nv_bfloat16>(exists ? expf(score - larger) : 0.0f);
    shared.weights[h * kWeightPitch + lane] = weight;
    const float sum = sum_of_warp(to_float(weight));
    __syncwarp();  // all lanes have read the totals
    if (lane != 0) continue;
    const float factor = rescaling(before.total, before.largest, larger);
    shared.totals[h] = {larger, before.total * factor + sum};
    shared.factors[h] = factor;
  }
}

/// Adds the weighted rows of a tile to the sums of a warp's columns, after these were multiplied by the factors.
__device__ inline void add_rows(const Args& args, const Shared& shared, const __nv_bfloat16* tile,
                                float (&sums)[kMostGroups][2][4]) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, pitch = args.pitch();
  const int columns = args.latent() / kWarps;
  const float of_rows[2] = {shared.factors[lane / 4], shared.factors[lane / 4 + 8]};
#pragma unroll
  for (auto& of_columns : sums) {
#pragma unroll
    for (auto& of_half : of_columns) {
#pragma unroll
      for (int i = 0; i < 4; ++i) of_half[i] *= of_rows[i / 2];
    }
  }
#pragma unroll
  for (int k = 0; k < kTile; k += 16) {
    std::uint32_t a[4], b[kMostGroups][4];
    ptx::load_matrices<false>(shared.weights + lane % 16 * kWeightPitch + k + lane / 16 * 8, a);
    const __nv_bfloat16* const b_at = tile + (k + lane % 16) * pitch + warp * columns + lane / 16 * 8;
#pragma unroll
    for (int c = 0; c < kMostGroups; ++c) {
      if (c * kColumns < columns) ptx::load_matrices<true>(b_at + c * kColumns, b[c]);
    }
#pragma unroll
    for (int c = 0; c < kMostGroups; ++c) {
      if (c * kColumns >= columns) continue;
      ptx::multiply_add(a, b[c][0], b[c][1], sums[c][0]);
      ptx::multiply_add(a, b[c][2], b[c][3], sums[c][1]);
    }
  }
}

/// Writes a block's sums and totals.
__device__ inline void store(const Args& args, const Shared& shared, std::int64_t token, std::int64_t first_head,
                             const float (&sums)[kMostGroups][2][4]) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, block = static_cast<int>(blockIdx.x);
  const int columns = args.latent() / kWarps;
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const std::int64_t head = first_head + lane / 4 + row * 8;
    if (head >= args.dims.num_heads) continue;
    float* const to = args.sums + args.part(token, head, block) * args.latent() + warp * columns + lane % 4 * 2;
#pragma unroll
    for (int c = 0; c < kMostGroups; ++c) {
      if (c * kColumns >= columns) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        *reinterpret_cast<float2*>(to + c * kColumns + half * 8) = {sums[c][half][row * 2], sums[c][half][row * 2 + 1]};
      }
    }
  }
  const int h = static_cast<int>(threadIdx.x);
  if (h < kHeads && first_head + h < args.dims.num_heads) {
    args.totals[args.part(token, first_head + h, block)] = shared.totals[h];
  }
}

/// Sums the weighted latents of 16 heads (blockIdx.y) of a token (blockIdx.z). Block x takes the tiles x, x +
/// num_blocks, ... of its text.
__global__ void __launch_bounds__(kThreads) sum_kernel(const Args args) {
  extern __shared__ __align__(16) std::byte memory[];
  let_next_kernel_begin();
  const Shared shared(memory, args.pitch());
  const std::int64_t token = blockIdx.z, first_head = std::int64_t{blockIdx.y} * kHeads;
  const std::int64_t end = args.places.num_positions_of(token);
  const std::int64_t step = std::int64_t{args.num_blocks} * kTile;
  const __nv_bfloat16* const text = args.cache + args.places.first_row_of(token) * args.row();
  if (threadIdx.x < kHeads) shared.totals[threadIdx.x] = {-INFINITY, 0.0f};
  // All rows but the newest were stored in earlier steps. They are complete, because a step begins with a copy of its
  // token ids to the GPU, which waits for all earlier kernels. So they are loaded before this kernel waits.
  std::int64_t first = std::int64_t{blockIdx.x} * kTile;
  if (first < end) load_tile(args, text, first, end, end - 1, shared.keys);
  wait_for_kernel_before();
  load_queries(args, token, first_head, shared.queries);
  if (first < end && end - 1 < first + kTile && threadIdx.x < kWarp) {
    copy_row(text + (end - 1) * args.row(), 0, args.row(), true, shared.keys + (end - 1 - first) * args.pitch());
  }
  __pipeline_commit();
  float sums[kMostGroups][2][4] = {};
  for (int stage = 0; first < end; first += step, stage = (stage + 1) % kStages) {
    const auto tile_of = [&](int s) { return shared.keys + s * kTile * args.pitch(); };
    if (first + step < end) load_tile(args, text, first + step, end, kNone, tile_of((stage + 1) % kStages));
    __pipeline_commit();
    __pipeline_wait_prior(1);
    __syncthreads();
    score(args, shared, tile_of(stage));
    __syncthreads();
    weigh(args, shared, min(end - first, std::int64_t{kTile}));
    __syncthreads();
    add_rows(args, shared, tile_of(stage), sums);
    __syncthreads();
  }
  store(args, shared, token, first_head, sums);
}

// Each thread of merge_kernel merges two latents.
static_assert(kWarps * kColumns * kMostGroups == 2 * kThreads);
constexpr int kOutputsPerWarp = 2, kOutputsPerBlock = kWarps * kOutputsPerWarp;

/// Computes kOutputsPerBlock outputs of a token (blockIdx.z) and head (blockIdx.y): merges what sum_kernel's blocks
/// have summed, and multiplies it by rows of W_v, kOutputsPerWarp per warp.
__global__ void __launch_bounds__(kThreads) merge_kernel(const Args args) {
  __shared__ float factors[kMostBlocks];
  __shared__ __align__(16) __nv_bfloat16 merged[kWarps * kColumns * kMostGroups];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const std::int64_t token = blockIdx.z, head = blockIdx.y, dim_v = args.dims.dim_v;
  const std::int64_t first = std::int64_t{blockIdx.x} * kOutputsPerBlock + warp * kOutputsPerWarp;
  let_next_kernel_begin();
  const __nv_bfloat16* w[kOutputsPerWarp];
#pragma unroll
  for (int c = 0; c < kOutputsPerWarp; ++c) {
    const std::int64_t row = head * (args.dims.dim_nope + dim_v) + args.dims.dim_nope + min(first + c, dim_v - 1);
    w[c] = args.wkv_b + row * args.latent();
  }
  DotsOfWarp<__nv_bfloat16, kOutputsPerWarp> dots(w, args.latent());
  wait_for_kernel_before();
  const std::int64_t part = args.part(token, head, 0);
  // Each thread merges two latents. All loads are on their way before the first is used.
  const int at = static_cast<int>(threadIdx.x) * 2;
  float2 sums_of[kMostBlocks];
#pragma unroll
  for (int block = 0; block < kMostBlocks; ++block) {
    const bool exists = block < args.num_blocks && at < args.latent();
    const float* const from = args.sums + (part + block) * args.latent() + at;
    sums_of[block] = exists ? *reinterpret_cast<const float2*>(from) : float2{};
  }
  if (warp == 0) {
    const Totals of_block = lane < args.num_blocks ? args.totals[part + lane] : Totals{-INFINITY, 0.0f};
    const float largest = max_of_warp(of_block.largest);
    const float factor = rescaling(of_block.total, of_block.largest, largest);
    factors[lane] = factor / sum_of_warp(of_block.total * factor);
  }
  __syncthreads();
  if (at < args.latent()) {
    float2 sum{};
#pragma unroll
    for (int block = 0; block < kMostBlocks; ++block) {
      sum.x += sums_of[block].x * factors[block];
      sum.y += sums_of[block].y * factors[block];
    }
    merged[at] = from_float<__nv_bfloat16>(sum.x);
    merged[at + 1] = from_float<__nv_bfloat16>(sum.y);
  }
  __syncthreads();
  const __nv_bfloat16* const rows[1] = {merged};
  float sums[kOutputsPerWarp][1];
  dots.with(rows, sums);
#pragma unroll
  for (int c = 0; c < kOutputsPerWarp; ++c) {
    if (lane == c && first + c < dim_v) {
      args.o[(token * args.dims.num_heads + head) * dim_v + first + c] = from_float<__nv_bfloat16>(sums[c][0]);
    }
  }
}

inline void launch(const Context& op, const MlaDecodeDims& dims, const MlaDecodeOperands& operands, const Tensor& o) {
  const Tensor& cache = operands.cache_SPN;
  const std::int64_t num_tokens = operands.q.dim(0), num_tiles = (cache.dim(1) + kTile - 1) / kTile;
  const std::int64_t num_blocks = std::min<std::int64_t>(num_tiles, kMostBlocks);
  const ArenaScope scope(*op.arena);
  const Tensor sums = op.arena->allocate({num_tokens * dims.num_heads, num_blocks, dims.dim_latent}, DType::kFloat32);
  const Tensor totals = op.arena->allocate({num_tokens * dims.num_heads, num_blocks, 2}, DType::kFloat32);
  if (op.measuring()) return;
  const Args args{.dims = dims,
                  .q = numbers<const __nv_bfloat16>(operands.q),
                  .q_latent = numbers<const __nv_bfloat16>(operands.q_latent),
                  .cache = numbers<const __nv_bfloat16>(cache),
                  .wkv_b = numbers<const __nv_bfloat16>(operands.wkv_b),
                  .places = CachePlaces(operands.slot_T, operands.position_T, cache),
                  .num_blocks = static_cast<int>(num_blocks),
                  .sums = numbers<float>(sums),
                  .totals = static_cast<Totals*>(totals.raw()),
                  .o = numbers<__nv_bfloat16>(o)};
  const std::size_t shared_bytes = Shared::bytes(pitch_of(dims));
  TESSERA_CUDA(
      cudaFuncSetAttribute(sum_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)));
  const auto blocks = [](std::int64_t count, std::int64_t per_block) {
    return static_cast<unsigned>((count + per_block - 1) / per_block);
  };
  const auto tokens = static_cast<unsigned>(num_tokens), heads = static_cast<unsigned>(dims.num_heads);
  const dim3 grid(static_cast<unsigned>(num_blocks), blocks(dims.num_heads, kHeads), tokens);
  launch_early(op, sum_kernel, grid, kThreads, shared_bytes, args);
  launch_early(op, merge_kernel, dim3(blocks(dims.dim_v, kOutputsPerBlock), heads, tokens), kThreads, 0, args);
}

}  // namespace decode_tiles

}  // namespace tessera::cuda
