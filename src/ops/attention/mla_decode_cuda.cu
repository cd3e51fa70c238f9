#include <cooperative_groups.h>

#include "ops/attention/mla_decode.h"
#include "ops/kit/reduce.cuh"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;
constexpr int kBlocks = 8;     // blocks of a cluster, which share a text's positions
constexpr int kMaxRow = 1024;  // numbers per position

template <typename T>
__global__ void store_latents_kernel(const T* latent, std::int64_t latent_stride, const T* k_rope,
                                     std::int64_t rope_stride, const std::int32_t* slots, const std::int32_t* positions,
                                     std::int64_t num_slots, std::int64_t num_positions, int num_latent, int num_rope,
                                     T* cache) {
  let_next_kernel_begin();
  wait_for_kernel_before();
  const std::int64_t t = blockIdx.x, slot = slots[t], position = positions[t];
  // A token outside the cache is skipped, because a GPU cannot throw.
  if (slot < 0 || slot >= num_slots || position < 0 || position >= num_positions) return;
  T* row = cache + (slot * num_positions + position) * (num_latent + num_rope);
  for (int i = threadIdx.x; i < num_latent + num_rope; i += kThreads) {
    row[i] = i < num_latent ? latent[t * latent_stride + i] : k_rope[t * rope_stride + i - num_latent];
  }
}

/// Holds the sums of weighted latents over a part of a text's positions, relative to exp(largest), and their weights'
/// sum. Without positions, `total` is 0. If a score is NaN, so is `total`, though `largest` ignores it.
struct Part {
  const float* sums;  // [num_latent]
  float largest, total;
};

/// Returns element i of the sums of all parts, relative to exp(largest). They are added in the order of the parts.
template <int kParts>
__device__ float merge(const Part (&parts)[kParts], float largest, int i) {
  float sum = 0.0f;
#pragma unroll
  for (const Part& part : parts) {
    if (part.total != 0.0f) sum += part.sums[i] * expf(part.largest - largest);
  }
  return sum;
}

/// Returns the largest score and the total weight of all parts.
template <int kParts>
__device__ Part merge_totals(const Part (&parts)[kParts]) {
  Part all{nullptr, parts[0].largest, 0.0f};
#pragma unroll
  for (const Part& part : parts) all.largest = fmaxf(all.largest, part.largest);
#pragma unroll
  for (const Part& part : parts) {
    if (part.total != 0.0f) all.total += part.total * expf(part.largest - all.largest);
  }
  return all;
}

/// Writes a head's output [num_latent] from what the warps of a cluster's blocks have summed. `sums_of` is [kWarps + 1,
/// num_latent]: the sums of this block's warps, then room for the block's own. All threads of the cluster call it.
template <typename T>
__device__ void merge_blocks(float* sums_of, const float* largest, const float* totals, int num_latent, T* out) {
  __shared__ Part block;
  Part warps[kWarps], blocks[kBlocks];
#pragma unroll
  for (int w = 0; w < kWarps; ++w) warps[w] = {sums_of + w * num_latent, largest[w], totals[w]};
  Part merged = merge_totals(warps);
  float* const of_block = sums_of + kWarps * num_latent;
  for (int i = threadIdx.x; i < num_latent; i += kThreads) of_block[i] = merge(warps, merged.largest, i);
  merged.sums = of_block;
  if (threadIdx.x == 0) block = merged;
  const auto cluster = cooperative_groups::this_cluster();
  cluster.sync();
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    const Part* const of_other = cluster.map_shared_rank(&block, b);
    blocks[b] = {cluster.map_shared_rank(of_block, b), of_other->largest, of_other->total};
  }
  merged = merge_totals(blocks);
  for (int i = blockIdx.z * kThreads + threadIdx.x; i < num_latent; i += kBlocks * kThreads) {
    out[i] = from_float<T>(merge(blocks, merged.largest, i) / merged.total);
  }
  cluster.sync();  // Other blocks read this one's shared memory.
}

/// A cluster of blocks computes one token and head. Its warps take the positions in turn, with a running softmax. Of
/// each row, lane l has the groups l, l + 32, ... of kCount numbers. Each block merges what its warps have summed, and
/// then a part of the latents over all blocks.
template <typename T, int kCount>
__global__ void __launch_bounds__(kThreads) __cluster_dims__(1, 1, kBlocks)
    decode_kernel(const MlaDecodeDims dims, const T* q, const T* q_latent, const T* cache, const std::int32_t* slots,
                  const std::int32_t* positions, std::int64_t num_slots, std::int64_t num_positions, T* o_latent) {
  let_next_kernel_begin();
  wait_for_kernel_before();
  constexpr int kGroups = kMaxRow / kWarp / kCount;
  extern __shared__ float sums_of[];  // [kWarps + 1][latent]: of each warp, and of the block
  __shared__ float largest[kWarps], totals[kWarps];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const std::int64_t t = blockIdx.x, head = blockIdx.y, slot = slots[t];
  const int num_latent = static_cast<int>(dims.dim_latent), row = num_latent + static_cast<int>(dims.dim_rope);
  const auto index = [&](int group) { return (group * kWarp + lane) * kCount; };
  float query[kGroups][kCount], sums[kGroups][kCount] = {}, max = -INFINITY, total = 0.0f;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    if (index(g) < num_latent) {
      load_lanes(q_latent + (t * dims.num_heads + head) * num_latent + index(g), query[g]);
    } else if (index(g) < row) {
      const std::int64_t of_head = (t * dims.num_heads + head) * (dims.dim_nope + dims.dim_rope) + dims.dim_nope;
      load_lanes(q + of_head + index(g) - num_latent, query[g]);
    }
  }
  const bool exists = 0 <= slot && slot < num_slots && positions[t] < num_positions;
  const std::int64_t end = exists ? positions[t] + 1 : 0;
  for (std::int64_t p = blockIdx.z * kWarps + warp; p < end; p += kBlocks * kWarps) {
    const T* from = cache + (slot * num_positions + p) * row;
    float key[kGroups][kCount], score = 0.0f;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      if (index(g) < row) load_lanes(from + index(g), key[g]);
    }
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      if (index(g) >= row) continue;
#pragma unroll
      for (int i = 0; i < kCount; ++i) score += query[g][i] * key[g][i];
    }
    score = sum_of_warp(score) * dims.scale;
    if (score > max) {
      const float shrink = expf(max - score);
      max = score;
      total *= shrink;
#pragma unroll
      for (auto& group : sums) {
#pragma unroll
        for (float& sum : group) sum *= shrink;
      }
    }
    const float weight = expf(score - max);
    total += weight;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      if (index(g) >= num_latent) continue;
#pragma unroll
      for (int i = 0; i < kCount; ++i) sums[g][i] += weight * key[g][i];
    }
  }
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    if (index(g) >= num_latent) continue;
#pragma unroll
    for (int i = 0; i < kCount; ++i) sums_of[warp * num_latent + index(g) + i] = sums[g][i];
  }
  if (lane == 0) largest[warp] = max, totals[warp] = total;
  __syncthreads();
  merge_blocks(sums_of, largest, totals, num_latent, o_latent + (t * dims.num_heads + head) * num_latent);
}

}  // namespace

void store_latents(const Context& op, const Tensor& latent_TC, const Tensor& k_rope_TR, const Tensor& slot_T,
                   const Tensor& position_T, const Tensor& cache_SPN) {
  if (op.measuring() || latent_TC.dim(0) == 0) return;
  for_float_type(latent_TC.dtype(), [&]<typename T>(T) {
    launch_early(op, store_latents_kernel<T>, static_cast<unsigned>(latent_TC.dim(0)), kThreads, 0,
                 numbers<const T>(latent_TC), latent_TC.stride(), numbers<const T>(k_rope_TR), k_rope_TR.stride(),
                 numbers<const std::int32_t>(slot_T), numbers<const std::int32_t>(position_T), cache_SPN.dim(0),
                 cache_SPN.dim(1), static_cast<int>(latent_TC.dim(1)), static_cast<int>(k_rope_TR.dim(1)),
                 numbers<T>(cache_SPN));
  });
}

void mla_decode(const Context& op, const MlaDecodeDims& dims, const MlaDecodeOperands& operands,
                const Tensor& o_latent) {
  const Tensor& cache = operands.cache_SPN;
  const std::int64_t num_tokens = operands.q.dim(0);
  TESSERA_CHECK(dims.dim_latent + dims.dim_rope <= kMaxRow, "{} + {}", dims.dim_latent, dims.dim_rope);
  if (op.measuring() || num_tokens == 0) return;
  const bool fits = in_lanes(operands.q, operands.q_latent, cache) && dims.dim_latent % kLanes == 0 &&
                    dims.dim_rope % kLanes == 0 && dims.dim_nope % kLanes == 0;
  for_float_type(cache.dtype(), [&]<typename T>(T) {
    for_lanes(fits, [&](auto lanes) {
      const dim3 grid(static_cast<unsigned>(num_tokens), static_cast<unsigned>(dims.num_heads), kBlocks);
      const std::size_t shared_bytes = static_cast<std::size_t>((kWarps + 1) * dims.dim_latent) * sizeof(float);
      launch_early(op, decode_kernel<T, decltype(lanes)::value>, grid, kThreads, shared_bytes, dims,
                   numbers<const T>(operands.q), numbers<const T>(operands.q_latent), numbers<const T>(cache),
                   numbers<const std::int32_t>(operands.slot_T), numbers<const std::int32_t>(operands.position_T),
                   cache.dim(0), cache.dim(1), numbers<T>(o_latent));
    });
  });
}

}  // namespace tessera::cuda
