// The attention core of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), after the up-projections.
//
// Per head: k = [k_nope | k_rope], k_rope shared by all heads; o = softmax(scale · q · kᵀ, causal, within documents) ·
// v. Nothing of size S × S is stored: blocks of keys with a running softmax, recomputed in the backward
// (FlashAttention-2, arXiv 2307.08691).
#pragma once

#include "ops/context.h"

namespace tessera {

struct MlaDims {
  std::int64_t num_seqs, seq_len, num_heads;
  std::int64_t dim_nope, dim_rope, dim_v;  // per head
  float scale;                             // of the scores
};

struct MlaOperands {
  Tensor q;            // [T, H · (nope + rope)], per head nope then rope, rotated
  Tensor kv;           // [T, H · (nope + v)], per head k_nope then v
  Tensor k_rope;       // [T, rope], rotated
  Tensor doc_start_T;  // int32: index within its sequence of the first token that the token may attend to
};

/// o [T, H · v] (the type of q), lse_TH (float32: log of the sum of exp of the scaled scores).
void mla_attention_forward(const Context& context, const MlaDims& dims, const MlaOperands& operands, const Tensor& o,
                           const Tensor& lse_TH);

/// Gradients of q, kv and k_rope (summed over heads), assigned.
void mla_attention_backward(const Context& context, const MlaDims& dims, const MlaOperands& operands, const Tensor& o,
                            const Tensor& lse_TH, const Tensor& d_o, const Tensor& d_q, const Tensor& d_kv,
                            const Tensor& d_k_rope);

}  // namespace tessera
