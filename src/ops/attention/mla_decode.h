// Attention of new tokens over a cache of latents: multi-head latent attention with the up-projections absorbed
// (DeepSeek-V2, arXiv 2405.04434, sec. 2.1.2). Per token and layer the cache holds the normalised latent c and the
// rotated k_rope, C + R numbers for all heads together, in place of every head's keys and values:
//
//   q_nope · (W_k c) + q_rope · k_rope = (W_kᵀ q_nope) · c + q_rope · k_rope,
//   sum of p · (W_v c) = W_v (sum of p · c)
#pragma once

#include "ops/runtime/context.h"

namespace tessera {

/// cache_SPN[slot, position] = [latent | k_rope], for T tokens. latent_TC, k_rope_TR: float32 or bfloat16, strided;
/// cache_SPN [slots, positions, C + R] of their type; slot_T, position_T int32.
void store_latents(const Context& context, const Tensor& latent_TC, const Tensor& k_rope_TR, const Tensor& slot_T,
                   const Tensor& position_T, const Tensor& cache_SPN);

struct MlaDecodeDims {
  std::int64_t num_heads;
  std::int64_t dim_nope, dim_rope;  // of q, per head
  std::int64_t dim_latent;          // C
  float scale;                      // of the scores
};

struct MlaDecodeOperands {
  Tensor q;           // [T, H · (nope + rope)], rotated; only the rope parts are read
  Tensor q_latent;    // [T, H · C]: per head W_kᵀ q_nope
  Tensor cache_SPN;   // as above
  Tensor slot_T;      // int32
  Tensor position_T;  // int32; token t attends to positions 0 to position_T[t] of its slot, which are stored already
};

/// o_latent [T, H · C]: per head the sum of p · c, p = softmax of the scaled scores in float32. All float tensors have
/// one type, float32 or bfloat16.
void mla_decode(const Context& context, const MlaDecodeDims& dims, const MlaDecodeOperands& operands,
                const Tensor& o_latent);

}  // namespace tessera
