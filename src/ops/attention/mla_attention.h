// The attention core of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), after the up-projections.
//
// Per head: k = [k_nope | k_rope], k_rope shared by all heads; o = softmax(scale · q · kᵀ, causal, within documents) ·
// v. Nothing of size S × S is stored: blocks of keys with a running softmax, recomputed in the backward
// (FlashAttention-2, arXiv 2307.08691).
//
// On a GPU bfloat16 goes through cuDNN, which needs libcudnn.so.9 when it is first called; the rest, float32 above all,
// through plain kernels that are there to be right, not fast (head dims up to 256). The backward gives the same bits
// every time if the runtime is told to be deterministic.
#pragma once

#include <span>

#include "ops/runtime/context.h"

namespace tessera {

/// Tokens [begin, end) of a sequence.
struct TokenRange {
  std::int64_t begin, end;
};

struct MlaDims {
  std::int64_t num_seqs, seq_len, num_heads;
  std::int64_t dim_nope, dim_rope, dim_v;  // per head
  float scale;                             // of the scores
  /// The tokens of each sequence that are queries, rising, one or two ranges; empty: all. Keys and values are always
  /// those of all tokens.
  std::span<const TokenRange> queries = {};
  /// All of doc_start_T is 0, which the caller knows; a GPU takes a faster way then.
  bool whole_sequences = false;

  /// Whether every token is a query.
  bool all_are_queries() const {
    return queries.empty() || (queries.size() == 1 && queries[0].begin == 0 && queries[0].end == seq_len);
  }
  std::int64_t queries_per_seq() const;
};

/// T queries, and K = num_seqs · seq_len keys; both sequence by sequence.
struct MlaOperands {
  Tensor q;            // [T, H · (nope + rope)], per head nope then rope, rotated
  Tensor kv;           // [K, H · (nope + v)], per head k_nope then v
  Tensor k_rope;       // [K, rope], rotated
  Tensor doc_start_T;  // int32: index within its sequence of the first token that the query may attend to
};

/// o [T, H · v] (the type of q), lse_TH (float32: log of the sum of exp of the scaled scores).
void mla_attention_forward(const Context& context, const MlaDims& dims, const MlaOperands& operands, const Tensor& o,
                           const Tensor& lse_TH);

/// Gradients of q, kv and k_rope (summed over heads), assigned; of kv and k_rope those that come from these queries.
void mla_attention_backward(const Context& context, const MlaDims& dims, const MlaOperands& operands, const Tensor& o,
                            const Tensor& lse_TH, const Tensor& d_o, const Tensor& d_q, const Tensor& d_kv,
                            const Tensor& d_k_rope);

}  // namespace tessera
