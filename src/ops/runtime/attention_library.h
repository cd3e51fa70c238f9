// cuDNN's fused attention: o = softmax(scale · q · kᵀ, causal) · v in bfloat16, per head, forward and backward. It uses
// cuDNN's operation graph "scaled dot product attention" (docs.nvidia.com/deeplearning/cudnn). A graph is built once
// per shape.
//
// If `max_documents` = N > 0, the tokens are cut into at most N documents. Their number and lengths are data on the GPU
// (DocumentTable). A query then attends only to keys of its document.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_map>

#include "ops/runtime/runtime.h"

namespace tessera::cuda {

struct AttentionShape {
  std::int64_t num_seqs, seq_len;
  std::int64_t num_heads;    // heads that are computed; k has only these
  std::int64_t token_heads;  // heads that a token has in q, v, o and lse
  std::int64_t dim_qk, dim_v;
  std::int64_t v_stride;           // numbers from a head's v to the next head's
  std::int64_t max_documents = 0;  // 0 means whole sequences
  float scale;
  bool deterministic = false;  // for the backward only

  std::int64_t num_tokens() const { return num_seqs * seq_len; }
  bool operator==(const AttentionShape&) const = default;
};

/// Describes at most N = max_documents documents. lengths holds the number of tokens of each. The other arrays hold the
/// offset of each document's first number in an operand, and one more offset for the end. Entries after the last
/// document have length 0.
struct DocumentTable {
  std::int32_t* lengths = nullptr;  // [N]
  // [N + 1] each
  std::int64_t *of_q = nullptr, *of_k = nullptr, *of_v = nullptr, *of_o = nullptr, *of_lse = nullptr;
};

struct AttentionOperands {
  // bfloat16, from the first head that is computed: k is [T, num_heads, dim], and the others have token_heads per token
  void *q, *k, *v, *o;
  float* lse;  // [T, token_heads], but [B, num_heads, S] for the backward of whole sequences
  // Only the backward uses the gradients. They have the layouts of their operands.
  void *d_o = nullptr, *d_q = nullptr, *d_k = nullptr, *d_v = nullptr;
};

class AttentionLibrary {
 public:
  /// Throws Error if there is no cuDNN, or if it is too old.
  explicit AttentionLibrary(const Stream& stream);
  ~AttentionLibrary();
  AttentionLibrary(const AttentionLibrary&) = delete;
  AttentionLibrary& operator=(const AttentionLibrary&) = delete;

  /// Returns whether cuDNN's kernels accept these head dims and lengths.
  static bool supports(const AttentionShape& shape);
  /// Returns bytes of scratch memory for a pass, without asking cuDNN. It is for planning without a GPU. The bytes were
  /// measured on Hopper, where they suffice.
  static std::size_t estimated_workspace_bytes(const AttentionShape& shape, bool backward);

  /// Returns the bytes of scratch memory that cuDNN asks for. Builds the graph of the pass, unless it exists.
  std::size_t workspace_bytes(const AttentionShape& shape, bool backward);

  void forward(const AttentionShape& shape, const AttentionOperands& operands, const DocumentTable& documents,
               std::byte* workspace);
  void backward(const AttentionShape& shape, const AttentionOperands& operands, const DocumentTable& documents,
                std::byte* workspace);

 private:
  struct Implementation;
  std::unique_ptr<Implementation> implementation_;
};

}  // namespace tessera::cuda
