#include <cooperative_groups.h>

#include "ops/attention/mla_decode.h"
#include "ops/kit/dots.cuh"

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
  const std::int64_t t = blockIdx.x, slot = slots[t], position = positions[t];
  // A token outside the cache is skipped, because a GPU cannot throw.
  if (slot < 0 || slot >= num_slots || position < 0 || position >= num_positions) return;
  T* row = cache + (slot * num_positions + position) * (num_latent + num_rope);
  for (int i = threadIdx.x; i < num_latent + num_rope; i += kThreads) {
    row[i] = i < num_latent ? latent[t * latent_stride + i] : k_rope[t * rope_stride + i - num_latent];
  }
}

template <typename T>
struct NewTokens {
  const T *kv_a, *norm_weight;
  std::int64_t kv_a_stride;
  float norm_eps;
  T* q;
  std::int64_t q_stride;
  int num_heads, head_dim, num_latent, num_rope, num_pairs;  // num_pairs: rotated per head, 0 or num_rope / 2
  const float *cos, *sin;
  const std::int32_t *slots, *positions;
  std::int64_t num_slots, num_positions;
  T* cache;

  /// Rotates the pair at `from`, which is pair `i` of its head, for a position.
  __device__ void rotate(const T* from, std::int64_t position, int i, T* to) const {
    const float even = to_float(from[0]), odd = to_float(from[1]);
    const float c = cos[position * num_pairs + i], s = sin[position * num_pairs + i];
    to[0] = from_float<T>(even * c - odd * s);
    to[1] = from_float<T>(odd * c + even * s);
  }
};

/// A token (blockIdx.x) has a block that stores its latent and k_rope (blockIdx.y = 0). The others rotate a pair of its
/// queries per thread.
template <typename T>
__global__ void __launch_bounds__(kThreads) prepare_kernel(const NewTokens<T> tokens) {
  __shared__ float sums[kThreads / kWarp];
  let_next_kernel_begin();
  wait_for_kernel_before();
  const std::int64_t t = blockIdx.x, slot = tokens.slots[t], position = tokens.positions[t];
  // A token outside the cache is skipped, because a GPU cannot throw.
  if (slot < 0 || slot >= tokens.num_slots || position < 0 || position >= tokens.num_positions) return;
  if (blockIdx.y > 0) {
    const int pair = static_cast<int>((blockIdx.y - 1) * kThreads + threadIdx.x);
    if (pair >= tokens.num_heads * tokens.num_pairs) return;
    const int head = pair / tokens.num_pairs, i = pair % tokens.num_pairs;
    T* const at = tokens.q + t * tokens.q_stride + (head + 1) * tokens.head_dim - 2 * (tokens.num_pairs - i);
    tokens.rotate(at, position, i, at);
    return;
  }
  const T* const latent = tokens.kv_a + t * tokens.kv_a_stride;
  float squares = 0.0f;
  for (int i = threadIdx.x; i < tokens.num_latent; i += kThreads) squares += to_float(latent[i]) * to_float(latent[i]);
  const float mean = sum_of_block(squares, sums) / static_cast<float>(tokens.num_latent);
  const float rstd = 1.0f / sqrtf(mean + tokens.norm_eps);
  T* const row = tokens.cache + (slot * tokens.num_positions + position) * (tokens.num_latent + tokens.num_rope);
  for (int i = threadIdx.x; i < tokens.num_latent; i += kThreads) {
    row[i] = from_float<T>(to_float(latent[i]) * rstd * to_float(tokens.norm_weight[i]));
  }
  const T* const k_rope = latent + tokens.num_latent;
  for (int i = threadIdx.x; i < tokens.num_pairs; i += kThreads) {
    tokens.rotate(k_rope + 2 * i, position, i, row + tokens.num_latent + 2 * i);
  }
  for (int i = 2 * tokens.num_pairs + threadIdx.x; i < tokens.num_rope; i += kThreads) {
    row[tokens.num_latent + i] = k_rope[i];
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

/// Holds one number as PackedLanes holds several.
template <typename T>
struct PackedNumber {
  T number;
  __device__ void load(const T* from, bool exists) { number = exists ? *from : from_float<T>(0.0f); }
  __device__ void unpack(float (&x)[1]) const { x[0] = to_float(number); }
};

/// Sums a head's latents over the positions of a warp, with a running softmax. Of each row, lane l has the groups l,
/// l + 32, ... of kCount numbers.
template <typename T, int kCount>
struct WarpSums {
  static constexpr int kGroups = kMaxRow / kWarp / kCount;
  static constexpr int kAhead = kCount == 1 ? 1 : 4 / sizeof(T);  // positions that are loaded before the first is used
  using Packed = std::conditional_t<kCount == kLanes, PackedLanes<T>, PackedNumber<T>>;

  float query[kGroups][kCount] = {}, sums[kGroups][kCount] = {};
  float largest = -INFINITY, total = 0.0f;

  /// Returns the place in a row of a group's first number.
  __device__ static int index(int group) { return (group * kWarp + static_cast<int>(threadIdx.x) % kWarp) * kCount; }

  /// Adds the positions first, first + step, ... before `end`. Their rows lie in `text`.
  __device__ void add(const T* text, int row, int num_latent, float scale, std::int64_t first, int step,
                      std::int64_t end) {
    for (std::int64_t p = first; p < end; p += kAhead * step) {
      Packed keys[kAhead][kGroups];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          keys[a][g].load(text + (p + a * step) * row + index(g), p + a * step < end && index(g) < row);
        }
      }
      float scores[kAhead] = {}, key[kCount], larger = largest;
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          keys[a][g].unpack(key);
#pragma unroll
          for (int i = 0; i < kCount; ++i) scores[a] += query[g][i] * key[i];
        }
      }
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        scores[a] = sum_of_warp(scores[a]) * scale;
        if (p + a * step < end && scores[a] > larger) larger = scores[a];
      }
      if (larger > largest) shrink(expf(largest - larger));
      largest = larger;
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        if (p + a * step >= end) continue;
        const float weight = expf(scores[a] - largest);
        total += weight;
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          if (index(g) >= num_latent) continue;
          keys[a][g].unpack(key);
#pragma unroll
          for (int i = 0; i < kCount; ++i) sums[g][i] += weight * key[i];
        }
      }
    }
  }

 private:
  __device__ void shrink(float factor) {
    total *= factor;
#pragma unroll
    for (auto& group : sums) {
#pragma unroll
      for (float& sum : group) sum *= factor;
    }
  }
};

/// A cluster of blocks computes one token and head. Its warps take the positions in turn. Each block merges what its
/// warps have summed, and then a part of the latents over all blocks.
template <typename T, int kCount>
__global__ void __launch_bounds__(kThreads) __cluster_dims__(1, 1, kBlocks)
    decode_kernel(const MlaDecodeDims dims, const T* q, const T* q_latent, const T* cache, const std::int32_t* slots,
                  const std::int32_t* positions, std::int64_t num_slots, std::int64_t num_positions, T* o_latent) {
  using Sums = WarpSums<T, kCount>;
  let_next_kernel_begin();
  wait_for_kernel_before();
  extern __shared__ float sums_of[];  // [kWarps + 1][latent]: of each warp, and of the block
  __shared__ float largest[kWarps], totals[kWarps];
  const int warp = threadIdx.x / kWarp;
  const std::int64_t t = blockIdx.x, head = blockIdx.y, slot = slots[t];
  const int num_latent = static_cast<int>(dims.dim_latent), row = num_latent + static_cast<int>(dims.dim_rope);
  Sums of_warp;
#pragma unroll
  for (int g = 0; g < Sums::kGroups; ++g) {
    const int i = Sums::index(g);
    if (i < num_latent) {
      load_lanes(q_latent + (t * dims.num_heads + head) * num_latent + i, of_warp.query[g]);
    } else if (i < row) {
      const std::int64_t of_head = (t * dims.num_heads + head) * (dims.dim_nope + dims.dim_rope) + dims.dim_nope;
      load_lanes(q + of_head + i - num_latent, of_warp.query[g]);
    }
  }
  const bool exists = 0 <= slot && slot < num_slots && positions[t] < num_positions;
  of_warp.add(cache + slot * num_positions * row, row, num_latent, dims.scale, blockIdx.z * kWarps + warp,
              kBlocks * kWarps, exists ? positions[t] + 1 : 0);
#pragma unroll
  for (int g = 0; g < Sums::kGroups; ++g) {
    const int first = Sums::index(g);
    if (first >= num_latent) continue;
#pragma unroll
    for (int i = 0; i < kCount; ++i) sums_of[warp * num_latent + first + i] = of_warp.sums[g][i];
  }
  if (threadIdx.x % kWarp == 0) largest[warp] = of_warp.largest, totals[warp] = of_warp.total;
  __syncthreads();
  merge_blocks(sums_of, largest, totals, num_latent, o_latent + (t * dims.num_heads + head) * num_latent);
}

}  // namespace

void store_latents(const Context& op, const Tensor& latent_TC, const Tensor& k_rope_TR, const Tensor& slot_T,
                   const Tensor& position_T, const Tensor& cache_SPN) {
  if (op.measuring() || latent_TC.dim(0) == 0) return;
  for_float_type(latent_TC.dtype(), [&]<typename T>(T) {
    store_latents_kernel<T><<<static_cast<unsigned>(latent_TC.dim(0)), kThreads, 0, stream_of(op)>>>(
        numbers<const T>(latent_TC), latent_TC.stride(), numbers<const T>(k_rope_TR), k_rope_TR.stride(),
        numbers<const std::int32_t>(slot_T), numbers<const std::int32_t>(position_T), cache_SPN.dim(0),
        cache_SPN.dim(1), static_cast<int>(latent_TC.dim(1)), static_cast<int>(k_rope_TR.dim(1)),
        numbers<T>(cache_SPN));
  });
}

void prepare_mla_decode(const Context& op, const MlaNewTokens& tokens, const Tensor& slot_T, const Tensor& position_T,
                        const Tensor& cache_SPN) {
  const std::int64_t num_tokens = tokens.kv_a.dim(0), num_pairs = tokens.rope_dim / 2;
  if (op.measuring() || num_tokens == 0) return;
  for_float_type(tokens.kv_a.dtype(), [&]<typename T>(T) {
    const NewTokens<T> args{.kv_a = numbers<const T>(tokens.kv_a),
                            .norm_weight = numbers<const T>(tokens.norm_weight_C),
                            .kv_a_stride = tokens.kv_a.stride(),
                            .norm_eps = tokens.norm_eps,
                            .q = numbers<T>(tokens.q),
                            .q_stride = tokens.q.stride(),
                            .num_heads = static_cast<int>(tokens.num_heads),
                            .head_dim = static_cast<int>(tokens.q.dim(1) / tokens.num_heads),
                            .num_latent = static_cast<int>(tokens.norm_weight_C.dim(0)),
                            .num_rope = static_cast<int>(tokens.kv_a.dim(1) - tokens.norm_weight_C.dim(0)),
                            .num_pairs = static_cast<int>(num_pairs),
                            .cos = numbers<const float>(tokens.cos_PM),
                            .sin = numbers<const float>(tokens.sin_PM),
                            .slots = numbers<const std::int32_t>(slot_T),
                            .positions = numbers<const std::int32_t>(position_T),
                            .num_slots = cache_SPN.dim(0),
                            .num_positions = cache_SPN.dim(1),
                            .cache = numbers<T>(cache_SPN)};
    const std::int64_t query_blocks = (tokens.num_heads * num_pairs + kThreads - 1) / kThreads;
    launch_early(op, prepare_kernel<T>,
                 dim3(static_cast<unsigned>(num_tokens), static_cast<unsigned>(1 + query_blocks)), kThreads, 0, args);
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
