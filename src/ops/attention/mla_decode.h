// Attention of new tokens over a cache of latents. This is multi-head latent attention with absorbed up-projections
// (DeepSeek-V2, arXiv 2405.04434, sec. 2.1.2). The cache holds the normalised latent c and the rotated k_rope of each
// token and layer. These are C + R numbers for all heads together. They replace the keys and values of every head:
//
//   q_nope · (W_k c) + q_rope · k_rope = (W_kᵀ q_nope) · c + q_rope · k_rope,
//   sum of p · (W_v c) = W_v (sum of p · c)
//
// On a GPU, prepare_mla_decode and mla_decode take C + R up to 1024, and otherwise throw Error.
#pragma once

#include "ops/runtime/context.h"
#include "ops/runtime/gemm_key.h"

namespace tessera {

/// Assigns [latent | k_rope] of each of T tokens to cache_SPN[slot, position]. latent_TC and k_rope_TR are float32 or
/// bfloat16, and may be strided. cache_SPN is [slots, positions, C + R] and has their type. slot_T and position_T are
/// int32. Of a token outside the cache, a CPU throws InternalError, and a GPU stores nothing.
void store_latents(const Context& context, const Tensor& latent_TC, const Tensor& k_rope_TR, const Tensor& slot_T,
                   const Tensor& position_T, const Tensor& cache_SPN);

/// Holds T new tokens as the products in front of attention leave them.
struct MlaNewTokens {
  Tensor kv_a;           // [T, C + R]: the latent before its norm, then k_rope before its rotation; strided
  Tensor norm_weight_C;  // of the latents' norm (ops/norm/rmsnorm.h)
  float norm_eps;
  Tensor q;         // [T, H · (nope + R)]; the last R numbers of each head are rotated in place
  Tensor wkv_b;     // [H · (nope + v), C]: per head the rows of W_k, then those of W_v
  Tensor q_latent;  // [T, H · C]: becomes per head W_kᵀ q_nope
  std::int64_t num_heads;
  std::int64_t rope_dim = 0;        // R, or 0 in a layer without rotation
  Tensor cos_PM = {}, sin_PM = {};  // of ops/attention/rope.h

  std::int64_t nope() const { return q.dim(1) / num_heads - (kv_a.dim(1) - norm_weight_C.dim(0)); }
  /// Calls multiply(a, b, transpose_b, c, batch) with the operands of batched_gemm (ops/gemm/gemm.h) for q_latent.
  template <typename Multiply>
  decltype(auto) absorb(Multiply&& multiply) const {
    const std::int64_t latent = norm_weight_C.dim(0);
    return multiply(q.columns(0, nope()), wkv_b.rows(0, nope()), /*transpose_b=*/false, q_latent.columns(0, latent),
                    GemmBatch{.count = num_heads,
                              .step_a = q.dim(1) / num_heads,
                              .step_b = wkv_b.dim(0) / num_heads * latent,
                              .step_c = latent});
  }
};

/// Makes new tokens ready for mla_decode: assigns [norm(latent) | rotated k_rope] to cache_SPN[slot, position], rotates
/// q, and computes q_latent. All float tensors but cos and sin have one type, float32 or bfloat16. Tokens outside the
/// cache are treated as in store_latents.
void prepare_mla_decode(const Context& context, const MlaNewTokens& tokens, const Tensor& slot_T,
                        const Tensor& position_T, const Tensor& cache_SPN);

struct MlaDecodeDims {
  std::int64_t num_heads;
  std::int64_t dim_nope, dim_rope;  // dims of q per head
  std::int64_t dim_latent;          // C
  std::int64_t dim_v;               // of the output per head
  float scale;                      // factor of the scores before the softmax
};

struct MlaDecodeOperands {
  Tensor q;           // [T, H · (nope + rope)], rotated; only the rope parts are read
  Tensor q_latent;    // [T, H · C]: per head W_kᵀ q_nope
  Tensor wkv_b;       // [H · (nope + v), C]: per head the rows of W_k, then those of W_v
  Tensor cache_SPN;   // [slots, positions, C + R], filled by the operators above
  Tensor slot_T;      // int32
  Tensor position_T;  // int32; token t attends to positions 0 to position_T[t] of its slot, which are stored already
};

/// Assigns to o [T, H · v] per head W_v times the sum of p · c, which is rounded to the tensors' type. p is the softmax
/// of the scaled scores, in float32. All float tensors have one type, float32 or bfloat16. On tensor cores, which take
/// bfloat16, p is rounded to it. Of a token outside the cache, a CPU throws InternalError, and a GPU's output is NaN.
///
/// With constant weights (Context::weights_are_constant) a GPU may read a slot's rows before the kernels in front have
/// ended, except each token's newest row. So the other rows must be older: a step must have one token per slot, and
/// begin with work that waits for all earlier kernels, such as a copy of its token ids.
void mla_decode(const Context& context, const MlaDecodeDims& dims, const MlaDecodeOperands& operands, const Tensor& o);

/// The second half of mla_decode, for its implementations: assigns to o [T, H · v] per head W_v times the head's part
/// of o_latent [T, H · C].
void multiply_values(const Context& context, const MlaDecodeDims& dims, const Tensor& o_latent, const Tensor& wkv_b,
                     const Tensor& o);

}  // namespace tessera
