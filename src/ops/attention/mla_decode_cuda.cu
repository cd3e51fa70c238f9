#include "ops/attention/mla_decode_tiles.cuh"
#include "ops/gemm/few_rows.cuh"
#include "ops/gemm/gemm.h"
#include "ops/kit/formulas.cuh"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;
constexpr int kMaxRow = 1024;  // numbers per position

void check_fits(std::int64_t dim_latent, std::int64_t dim_rope) {
  require(
      dim_latent + dim_rope <= kMaxRow,
      "the cache of a GPU takes latents and rotated keys of up to {} numbers, not {} + {} (model.args.kv_lora_rank, "
      "qk_rope_head_dim)",
      kMaxRow, dim_latent, dim_rope);
}

template <typename T>
__global__ void store_latents_kernel(const T* latent, std::int64_t latent_stride, const T* k_rope,
                                     std::int64_t rope_stride, const CachePlaces places, int num_latent, int num_rope,
                                     T* cache) {
  const std::int64_t t = blockIdx.x;
  if (!places.contain(t)) return;
  T* row = cache + (places.first_row_of(t) + places.positions[t]) * (num_latent + num_rope);
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
  CachePlaces places;
  T* cache;

  /// Rotates the pair at `from`, which is pair `i` of its head, for a position.
  __device__ void rotate(const T* from, std::int64_t position, int i, T* to) const {
    float even = to_float(from[0]), odd = to_float(from[1]);
    rotate_pair(cos[position * num_pairs + i], sin[position * num_pairs + i], even, odd);
    to[0] = from_float<T>(even);
    to[1] = from_float<T>(odd);
  }
};

/// Stores token t's normalised latent and its rotated k_rope, by a block.
template <typename T>
__device__ void store_new_token(const NewTokens<T>& tokens, std::int64_t t) {
  constexpr int kParts = kMaxRow / kThreads;
  __shared__ float slots[kWarps];
  const std::int64_t position = tokens.places.positions[t];
  const T* const latent = tokens.kv_a + t * tokens.kv_a_stride;
  T* const row = tokens.cache + (tokens.places.first_row_of(t) + position) * (tokens.num_latent + tokens.num_rope);
  float weights[kParts], numbers[kParts], squares = 0.0f;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const int i = part * kThreads + threadIdx.x;
    weights[part] = i < tokens.num_latent ? to_float(tokens.norm_weight[i]) : 0.0f;
  }
  wait_for_kernel_before();
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const int i = part * kThreads + threadIdx.x;
    numbers[part] = i < tokens.num_latent ? to_float(latent[i]) : 0.0f;
    squares += numbers[part] * numbers[part];
  }
  const float rstd = rstd_of(sum_of_block(squares, slots), tokens.num_latent, tokens.norm_eps);
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const int i = part * kThreads + threadIdx.x;
    if (i < tokens.num_latent) row[i] = from_float<T>(numbers[part] * rstd * weights[part]);
  }
  const T* const k_rope = latent + tokens.num_latent;
  for (int i = threadIdx.x; i < tokens.num_pairs; i += kThreads) {
    tokens.rotate(k_rope + 2 * i, position, i, row + tokens.num_latent + 2 * i);
  }
  for (int i = 2 * tokens.num_pairs + threadIdx.x; i < tokens.num_rope; i += kThreads) {
    row[tokens.num_latent + i] = k_rope[i];
  }
}

/// Block 0 of token t stores its latent and k_rope. Each thread of the token's other blocks rotates a pair of its
/// queries. Slots and positions are read at once, because they are copied to the GPU before a step's first kernel.
template <typename T>
__device__ void prepare(const NewTokens<T>& tokens, unsigned block, std::int64_t t) {
  let_next_kernel_begin();
  if (!tokens.places.contain(t)) return wait_for_kernel_before();  // kernels behind this one wait for this one only
  if (block == 0) return store_new_token(tokens, t);
  const int pair = static_cast<int>((block - 1) * kThreads + threadIdx.x);
  if (pair >= tokens.num_heads * tokens.num_pairs) return;
  const int head = pair / tokens.num_pairs, i = pair % tokens.num_pairs;
  T* const at = tokens.q + t * tokens.q_stride + (head + 1) * tokens.head_dim - 2 * (tokens.num_pairs - i);
  wait_for_kernel_before();
  tokens.rotate(at, tokens.places.positions[t], i, at);
}

template <typename T>
__global__ void __launch_bounds__(kThreads) prepare_kernel(const NewTokens<T> tokens) {
  prepare(tokens, blockIdx.x, blockIdx.y);
}

/// Does the same, and multiplies the queries by W_k. Of each token, `blocks_per_token` blocks prepare. The product's
/// blocks follow those of the last token.
template <typename T, int kRows>
__global__ void __launch_bounds__(kThreads)
    prepare_and_absorb_kernel(const NewTokens<T> tokens, unsigned num_tokens, unsigned blocks_per_token,
                              const FewRows<T, T> product, unsigned blocks_per_head) {
  static_assert(kThreads == kUntransposedThreads);
  const unsigned preparing = num_tokens * blocks_per_token;
  if (blockIdx.x < preparing) return prepare(tokens, blockIdx.x % blocks_per_token, blockIdx.x / blocks_per_token);
  const unsigned block = blockIdx.x - preparing;
  few_rows_untransposed<kRows>(product, block % blocks_per_head, block / blocks_per_head);
}

/// Sums a head's latents over the positions of a warp, with a running softmax. Lane l has the numbers l, l + 32, ... of
/// a row. `largest` and `total` are those of decode_tiles::Totals.
template <typename T>
struct WarpSums {
  static constexpr int kCount = kMaxRow / kWarp;

  float query[kCount] = {}, sums[kCount] = {};
  float largest = -INFINITY, total = 0.0f;

  /// Returns the place in a row of a lane's number i.
  __device__ static int index(int i) { return i * kWarp + static_cast<int>(threadIdx.x) % kWarp; }

  __device__ void add(const T* key_row, int row, float scale) {
    float key[kCount], score = 0.0f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) key[i] = index(i) < row ? to_float(key_row[index(i)]) : 0.0f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) score += query[i] * key[i];
    score = sum_of_warp(score) * scale;
    const float larger = fmaxf(largest, score);
    const float factor = decode_tiles::rescaling(total, largest, larger), weight = expf(score - larger);
    largest = larger;
    total = total * factor + weight;
#pragma unroll
    for (int i = 0; i < kCount; ++i) sums[i] = sums[i] * factor + weight * key[i];
  }
};

/// A block computes one token and head, for any type and sizes. Its warps take the positions in turn.
template <typename T>
__global__ void __launch_bounds__(kThreads) decode_kernel(const MlaDecodeDims dims, const T* q, const T* q_latent,
                                                          const T* cache, const CachePlaces places, T* o_latent) {
  using Sums = WarpSums<T>;
  let_next_kernel_begin();
  wait_for_kernel_before();
  extern __shared__ float sums_of[];  // [kWarps][latent]
  __shared__ float largest[kWarps], totals[kWarps];
  const int warp = threadIdx.x / kWarp;
  const std::int64_t t = blockIdx.x, head = blockIdx.y;
  const int num_latent = static_cast<int>(dims.dim_latent), row = num_latent + static_cast<int>(dims.dim_rope);
  const T* const of_latent = q_latent + (t * dims.num_heads + head) * num_latent;
  const T* const of_rope = q + (t * dims.num_heads + head) * (dims.dim_nope + dims.dim_rope) + dims.dim_nope;
  Sums of_warp;
#pragma unroll
  for (int i = 0; i < Sums::kCount; ++i) {
    const int at = Sums::index(i);
    if (at < row) of_warp.query[i] = to_float(at < num_latent ? of_latent[at] : of_rope[at - num_latent]);
  }
  const std::int64_t end = places.num_positions_of(t);
  for (std::int64_t p = warp; p < end; p += kWarps) {
    of_warp.add(cache + (places.first_row_of(t) + p) * row, row, dims.scale);
  }
#pragma unroll
  for (int i = 0; i < Sums::kCount; ++i) {
    if (Sums::index(i) < num_latent) sums_of[warp * num_latent + Sums::index(i)] = of_warp.sums[i];
  }
  if (threadIdx.x % kWarp == 0) largest[warp] = of_warp.largest, totals[warp] = of_warp.total;
  __syncthreads();
  float of_all = -INFINITY, total = 0.0f, factors[kWarps];
  for (const float of_one : largest) of_all = fmaxf(of_all, of_one);
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    factors[w] = decode_tiles::rescaling(totals[w], largest[w], of_all);
    total += totals[w] * factors[w];
  }
  for (int i = threadIdx.x; i < num_latent; i += kThreads) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += sums_of[w * num_latent + i] * factors[w];
    o_latent[(t * dims.num_heads + head) * num_latent + i] = from_float<T>(sum / total);
  }
}

}  // namespace

void store_latents(const Context& op, const Tensor& latent_TC, const Tensor& k_rope_TR, const Tensor& slot_T,
                   const Tensor& position_T, const Tensor& cache_SPN) {
  if (op.measuring() || latent_TC.dim(0) == 0) return;
  for_float_type(latent_TC.dtype(), [&]<typename T>(T) {
    store_latents_kernel<T><<<static_cast<unsigned>(latent_TC.dim(0)), kThreads, 0, stream_of(op)>>>(
        numbers<const T>(latent_TC), latent_TC.stride(), numbers<const T>(k_rope_TR), k_rope_TR.stride(),
        CachePlaces(slot_T, position_T, cache_SPN), static_cast<int>(latent_TC.dim(1)),
        static_cast<int>(k_rope_TR.dim(1)), numbers<T>(cache_SPN));
  });
}

void prepare_mla_decode(const Context& op, const MlaNewTokens& tokens, const Tensor& slot_T, const Tensor& position_T,
                        const Tensor& cache_SPN) {
  const std::int64_t num_tokens = tokens.kv_a.dim(0), num_pairs = tokens.rope_dim / 2;
  check_fits(tokens.norm_weight_C.dim(0), tokens.kv_a.dim(1) - tokens.norm_weight_C.dim(0));
  const bool few = tokens.absorb(is_few_rows);
  if (!few) tokens.absorb([&](const auto&... operands) { tessera::batched_gemm(op, operands...); });
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
                            .places = CachePlaces(slot_T, position_T, cache_SPN),
                            .cache = numbers<T>(cache_SPN)};
    const std::int64_t query_blocks = (tokens.num_heads * num_pairs + kThreads - 1) / kThreads;
    const auto of_tokens = static_cast<unsigned>(num_tokens), per_token = static_cast<unsigned>(1 + query_blocks);
    if (!few) return launch_early(op, prepare_kernel<T>, dim3(per_token, of_tokens), kThreads, 0, args);
    tokens.absorb([&](const Tensor& q, const Tensor& w_k, bool, const Tensor& q_latent, const GemmBatch& batch) {
      const FewRows<T, T> product(q, w_k, q_latent, Write::kAssign, batch);
      const unsigned per_head = untransposed_blocks(q_latent.dim(1)), heads = static_cast<unsigned>(batch.count);
      for_few_rows(num_tokens, [&](auto rows) {
        launch_early(op, prepare_and_absorb_kernel<T, decltype(rows)::value>, of_tokens * per_token + heads * per_head,
                     kThreads, 0, args, of_tokens, per_token, product, per_head);
      });
    });
  });
}

void mla_decode(const Context& op, const MlaDecodeDims& dims, const MlaDecodeOperands& operands, const Tensor& o) {
  const Tensor& cache = operands.cache_SPN;
  const std::int64_t num_tokens = operands.q.dim(0);
  check_fits(dims.dim_latent, dims.dim_rope);
  if (num_tokens == 0) return;
  if (cache.dtype() == DType::kBFloat16 && decode_tiles::takes(dims) &&
      in_lanes(operands.q, operands.q_latent, operands.wkv_b, cache)) {
    return decode_tiles::launch(op, dims, operands, o);
  }
  const ArenaScope scope(*op.arena);
  const Tensor o_latent = op.arena->allocate({num_tokens, dims.num_heads * dims.dim_latent}, cache.dtype());
  if (!op.measuring()) {
    for_float_type(cache.dtype(), [&]<typename T>(T) {
      const dim3 grid(static_cast<unsigned>(num_tokens), static_cast<unsigned>(dims.num_heads));
      const std::size_t shared_bytes = static_cast<std::size_t>(kWarps * dims.dim_latent) * sizeof(float);
      launch_early(op, decode_kernel<T>, grid, kThreads, shared_bytes, dims, numbers<const T>(operands.q),
                   numbers<const T>(operands.q_latent), numbers<const T>(cache),
                   CachePlaces(operands.slot_T, operands.position_T, cache), numbers<T>(o_latent));
    });
  }
  multiply_values(op, dims, o_latent, operands.wkv_b, o);
}

}  // namespace tessera::cuda
