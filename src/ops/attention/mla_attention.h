// The attention core of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), after the up-projections.
//
// Each head has the keys k = [k_nope | k_rope]. All heads share k_rope. The output of a head is
//   o = softmax(scale · q · kᵀ) · v, with a causal mask within documents.
// No matrix of size S × S is stored. The forward walks over blocks of keys with a running softmax, and the backward
// recomputes the blocks (FlashAttention-2, arXiv 2307.08691).
//
// On a GPU, cuDNN computes bfloat16. It needs libcudnn.so.9 at the first call. Plain kernels compute the rest, above
// all float32. They are made to be right, not to be fast. A GPU takes head dims up to 256, and otherwise throws Error.
// If the runtime is set to be deterministic, the backward gives the same bits every time.
#pragma once

#include <span>

#include "ops/runtime/context.h"

namespace tessera {

/// Holds the tokens [begin, end) of a sequence.
struct TokenRange {
  std::int64_t begin, end;
};

struct MlaDims {
  std::int64_t num_seqs, seq_len, num_heads;
  std::int64_t dim_nope, dim_rope, dim_v;  // per head
  float scale;                             // factor of the scores before the softmax
  /// The tokens of each sequence that are queries, as one or two ranges in ascending order. If it is empty, all tokens
  /// are queries. Keys and values are always those of all tokens.
  std::span<const TokenRange> queries = {};
  /// True if the caller knows that all of doc_start_T is 0. Then a GPU uses a faster way.
  bool whole_sequences = false;

  /// Returns whether every token is a query.
  bool all_are_queries() const {
    return queries.empty() || (queries.size() == 1 && queries[0].begin == 0 && queries[0].end == seq_len);
  }
  std::int64_t queries_per_seq() const;
};

/// Holds the operands for T queries and K = num_seqs · seq_len keys. Both are ordered sequence by sequence. q, kv and
/// k_rope have one type, float32 or bfloat16.
struct MlaOperands {
  Tensor q;       // [T, H · (nope + rope)], per head nope then rope, rotated
  Tensor kv;      // [K, H · (nope + v)], per head k_nope then v
  Tensor k_rope;  // [K, rope], rotated
  /// int32: index, within its sequence, of the first token that the query may attend to. It is at most the query's own,
  /// and never decreases from one query to the next of a sequence.
  Tensor doc_start_T;
};

/// Assigns to o [T, H · v], which has the type of q, and to lse_TH (float32). The latter is the log of the sum of exp
/// of a query's scaled scores.
void mla_attention_forward(const Context& context, const MlaDims& dims, const MlaOperands& operands, const Tensor& o,
                           const Tensor& lse_TH);

/// Assigns the gradients of q, kv and k_rope. The gradient of k_rope is summed over the heads. Those of kv and k_rope
/// contain only what these queries contribute.
void mla_attention_backward(const Context& context, const MlaDims& dims, const MlaOperands& operands, const Tensor& o,
                            const Tensor& lse_TH, const Tensor& d_o, const Tensor& d_q, const Tensor& d_kv,
                            const Tensor& d_k_rope);

}  // namespace tessera
