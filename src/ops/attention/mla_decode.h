// Attention of new tokens over a cache of latents. This is multi-head latent attention with absorbed up-projections
// (DeepSeek-V2, arXiv 2405.04434, sec. 2.1.2). The cache holds the normalised latent c and the rotated k_rope of each
// token and layer. These are C + R numbers for all heads together. They replace the keys and values of every head:
//
//   q_nope · (W_k c) + q_rope · k_rope = (W_kᵀ q_nope) · c + q_rope · k_rope,
//   sum of p · (W_v c) = W_v (sum of p · c)
#pragma once

#include "ops/runtime/context.h"

namespace tessera {

/// Assigns [latent | k_rope] of each of T tokens to cache_SPN[slot, position]. latent_TC and k_rope_TR are float32 or
/// bfloat16, and may be strided. cache_SPN is [slots, positions, C + R] and has their type. slot_T and position_T are
/// int32.
void store_latents(const Context& context, const Tensor& latent_TC, const Tensor& k_rope_TR, const Tensor& slot_T,
                   const Tensor& position_T, const Tensor& cache_SPN);

/// Holds T new tokens as the products in front of attention leave them.
struct MlaNewTokens {
  Tensor kv_a;           // [T, C + R]: the latent before its norm, then k_rope before its rotation; strided
  Tensor norm_weight_C;  // of the latents' norm (ops/norm/rmsnorm.h)
  float norm_eps;
  Tensor q;  // [T, H · head_dim]; the last numbers of each head are rotated in place
  std::int64_t num_heads;
  std::int64_t rope_dim = 0;        // R, or 0 in a layer without rotation
  Tensor cos_PM = {}, sin_PM = {};  // of ops/attention/rope.h
};

/// Makes new tokens ready for mla_decode: assigns [norm(latent) | rotated k_rope] to cache_SPN[slot, position], and
/// rotates q. All float tensors but cos and sin have one type, float32 or bfloat16.
void prepare_mla_decode(const Context& context, const MlaNewTokens& tokens, const Tensor& slot_T,
                        const Tensor& position_T, const Tensor& cache_SPN);

struct MlaDecodeDims {
  std::int64_t num_heads;
  std::int64_t dim_nope, dim_rope;  // dims of q per head
  std::int64_t dim_latent;          // C
  float scale;                      // factor of the scores before the softmax
};

struct MlaDecodeOperands {
  Tensor q;           // [T, H · (nope + rope)], rotated; only the rope parts are read
  Tensor q_latent;    // [T, H · C]: per head W_kᵀ q_nope
  Tensor cache_SPN;   // [slots, positions, C + R], filled by the operators above
  Tensor slot_T;      // int32
  Tensor position_T;  // int32; token t attends to positions 0 to position_T[t] of its slot, which are stored already
};

/// Assigns to o_latent [T, H · C] the sum of p · c for each head. p is the softmax of the scaled scores, in float32.
/// All float tensors have one type, float32 or bfloat16.
void mla_decode(const Context& context, const MlaDecodeDims& dims, const MlaDecodeOperands& operands,
                const Tensor& o_latent);

}  // namespace tessera
