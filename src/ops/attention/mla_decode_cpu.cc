#include <algorithm>
#include <cmath>
#include <cstring>

#include "ops/attention/mla_decode.h"
#include "ops/attention/rope.h"
#include "ops/cpu/types.h"
#include "ops/gemm/gemm.h"

namespace tessera::cpu {
namespace {

/// Number of heads of a token that share a pass over the cache. Each row of the cache is loaded once for all of them.
constexpr std::int64_t kHeadsPerTask = 4;

// The sum runs in vector lanes. Its order is fixed when the code is compiled.
float dot(const float* a, const float* b, std::int64_t n) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (std::int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

void add_scaled(float factor, const float* x, std::int64_t n, float* y) {
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) y[i] += factor * x[i];
}

/// Returns a row of the cache as float32: the row itself, or a widened copy.
const float* widened(const float* row, std::int64_t, float*) { return row; }
const float* widened(const BFloat16* row, std::int64_t n, float* copy) {
  for (std::int64_t i = 0; i < n; ++i) copy[i] = static_cast<float>(row[i]);
  return copy;
}

/// Throws InternalError if the cache has no row for token t.
void check_place(const Tensor& cache_SPN, const Tensor& slot_T, const Tensor& position_T, std::int64_t t) {
  const std::int32_t slot = slot_T.data<std::int32_t>()[t], position = position_T.data<std::int32_t>()[t];
  TESSERA_CHECK(0 <= slot && slot < cache_SPN.dim(0) && 0 <= position && position < cache_SPN.dim(1),
                "token {}: slot {} position {}, cache {}", t, slot, position, cache_SPN.shape().to_string());
}

/// Returns token t's row of the cache.
template <typename T>
T* row_in_cache(const Tensor& cache_SPN, const Tensor& slot_T, const Tensor& position_T, std::int64_t t) {
  check_place(cache_SPN, slot_T, position_T, t);
  return row_of<T>(cache_SPN[slot_T.data<std::int32_t>()[t]], position_T.data<std::int32_t>()[t]);
}

/// Returns the number of float32 in a task's scratch: queries and sums of its heads, scores, and a row of the cache.
std::int64_t scratch_floats(const MlaDecodeDims& dims, std::int64_t num_positions) {
  const std::int64_t row = dims.dim_latent + dims.dim_rope;
  return kHeadsPerTask * (row + dims.dim_latent + num_positions) + row;
}

template <typename T>
void decode_heads(const MlaDecodeDims& dims, const MlaDecodeOperands& operands, const Tensor& o_latent, std::int64_t t,
                  std::int64_t first_head, float* scratch) {
  const std::int64_t latent = dims.dim_latent, rope = dims.dim_rope, row = latent + rope;
  const std::int64_t heads = std::min(kHeadsPerTask, dims.num_heads - first_head);
  const std::int64_t num_positions = operands.position_T.data<std::int32_t>()[t] + 1;
  const Tensor cache = operands.cache_SPN[operands.slot_T.data<std::int32_t>()[t]];
  float* q = scratch;
  float* sums = q + kHeadsPerTask * row;
  float* scores = sums + kHeadsPerTask * latent;
  float* copy = scores + kHeadsPerTask * operands.cache_SPN.dim(1);
  for (std::int64_t h = 0; h < heads; ++h) {
    const std::int64_t head = first_head + h;
    const T* q_latent = row_of<T>(operands.q_latent, t) + head * latent;
    const T* q_rope = row_of<T>(operands.q, t) + head * (dims.dim_nope + rope) + dims.dim_nope;
    for (std::int64_t i = 0; i < latent; ++i) q[h * row + i] = load(q_latent[i]);
    for (std::int64_t i = 0; i < rope; ++i) q[h * row + latent + i] = load(q_rope[i]);
  }
  float largest[kHeadsPerTask], total[kHeadsPerTask] = {};
  std::fill_n(largest, kHeadsPerTask, -HUGE_VALF);
  for (std::int64_t p = 0; p < num_positions; ++p) {
    const float* k = widened(row_of<T>(cache, p), row, copy);
    for (std::int64_t h = 0; h < heads; ++h) {
      const float score = dims.scale * dot(q + h * row, k, row);
      scores[h * num_positions + p] = score;
      largest[h] = std::max(largest[h], score);
    }
  }
  std::fill_n(sums, heads * latent, 0.0f);
  for (std::int64_t p = 0; p < num_positions; ++p) {
    const float* c = widened(row_of<T>(cache, p), latent, copy);
    for (std::int64_t h = 0; h < heads; ++h) {
      const float weight = std::exp(scores[h * num_positions + p] - largest[h]);
      total[h] += weight;
      add_scaled(weight, c, latent, sums + h * latent);
    }
  }
  for (std::int64_t h = 0; h < heads; ++h) {
    T* o = row_of<T>(o_latent, t) + (first_head + h) * latent;
    for (std::int64_t i = 0; i < latent; ++i) store(o[i], sums[h * latent + i] / total[h]);
  }
}

/// Assigns to o_latent [T, H · C] the sum of p · c for each head.
void sum_latents(const Context& context, const MlaDecodeDims& dims, const MlaDecodeOperands& operands,
                 const Tensor& o_latent) {
  const std::int64_t num_tokens = operands.q.dim(0), heads = dims.num_heads;
  const Tensor& cache = operands.cache_SPN;
  const ThreadScratch scratch(context, static_cast<std::size_t>(scratch_floats(dims, cache.dim(1))) * sizeof(float));
  if (context.measuring()) return;
  for (std::int64_t t = 0; t < num_tokens; ++t) check_place(cache, operands.slot_T, operands.position_T, t);
  const std::int64_t tasks_per_token = (heads + kHeadsPerTask - 1) / kHeadsPerTask;
  for_float_type(cache.dtype(), [&]<typename T>(T) {
    parallel_for(num_tokens * tasks_per_token, [&](std::int64_t task) {
      decode_heads<T>(dims, operands, o_latent, task / tasks_per_token, task % tasks_per_token * kHeadsPerTask,
                      reinterpret_cast<float*>(scratch.mine()));
    });
  });
}

}  // namespace

void store_latents(const Context& context, const Tensor& latent_TC, const Tensor& k_rope_TR, const Tensor& slot_T,
                   const Tensor& position_T, const Tensor& cache_SPN) {
  const std::int64_t num_tokens = latent_TC.dim(0), latent = latent_TC.dim(1), rope = k_rope_TR.dim(1);
  if (context.measuring()) return;
  for_float_type(latent_TC.dtype(), [&]<typename T>(T) {
    for (std::int64_t t = 0; t < num_tokens; ++t) {
      T* row = row_in_cache<T>(cache_SPN, slot_T, position_T, t);
      std::copy_n(row_of<T>(latent_TC, t), latent, row);
      std::copy_n(row_of<T>(k_rope_TR, t), rope, row + latent);
    }
  });
}

void prepare_mla_decode(const Context& context, const MlaNewTokens& tokens, const Tensor& slot_T,
                        const Tensor& position_T, const Tensor& cache_SPN) {
  const std::int64_t num_tokens = tokens.kv_a.dim(0), latent = tokens.norm_weight_C.dim(0), row = tokens.kv_a.dim(1);
  tokens.absorb([&](const auto&... operands) { tessera::batched_gemm(context, operands...); });
  const ThreadScratch scratch(context, static_cast<std::size_t>(row) * sizeof(float));
  if (context.measuring()) return;
  const auto rotate = [&](const Tensor& x, std::int64_t num_heads, const Tensor& positions) {
    if (tokens.rope_dim == 0) return;
    tessera::rope(context, x, num_heads, tokens.rope_dim, positions, tokens.cos_PM, tokens.sin_PM,
                  RopeDirection::kForward, x);
  };
  for_float_type(tokens.kv_a.dtype(), [&]<typename T>(T) {
    const T* const weight = tokens.norm_weight_C.data<T>();
    for (std::int64_t t = 0; t < num_tokens; ++t) {
      T* const stored = row_in_cache<T>(cache_SPN, slot_T, position_T, t);
      const float* const x = widened(row_of<T>(tokens.kv_a, t), row, reinterpret_cast<float*>(scratch.mine()));
      const float mean = dot(x, x, latent) / static_cast<float>(latent);
      const float rstd = 1.0f / std::sqrt(mean + tokens.norm_eps);
      for (std::int64_t i = 0; i < latent; ++i) store(stored[i], x[i] * rstd * load(weight[i]));
      std::copy_n(row_of<T>(tokens.kv_a, t) + latent, row - latent, stored + latent);
      const Tensor k_rope_1R(stored + latent, {1, row - latent}, tokens.kv_a.dtype(), Device::kCpu);
      rotate(k_rope_1R, 1, position_T.rows(t, t + 1));
    }
  });
  rotate(tokens.q, tokens.num_heads, position_T);
}

void mla_decode(const Context& context, const MlaDecodeDims& dims, const MlaDecodeOperands& operands, const Tensor& o) {
  const std::int64_t num_tokens = operands.q.dim(0), heads = dims.num_heads;
  const DType dtype = operands.q.dtype();
  const ArenaScope scope(*context.arena);
  const Tensor o_latent = context.arena->allocate({num_tokens, heads * dims.dim_latent}, dtype);
  sum_latents(context, dims, operands, o_latent);
  multiply_values(context, dims, o_latent, operands.wkv_b, o);
}

}  // namespace tessera::cpu
