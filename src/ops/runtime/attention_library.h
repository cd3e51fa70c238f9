// cuDNN's fused attention: o = softmax(scale · q · kᵀ, causal) · v in bfloat16, per head, forward and backward
// (cuDNN's operation graph "scaled dot product attention", docs.nvidia.com/deeplearning/cudnn). Its graphs are built
// once per shape.
//
// Documents: with `max_documents` = N > 0 the tokens are cut into at most N documents, whose number and lengths are
// data on the GPU (DocumentTable); a query then sees the keys of its document only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_map>

#include "ops/runtime/runtime.h"

namespace tessera::cuda {

struct AttentionShape {
  std::int64_t num_seqs, seq_len, num_heads;
  std::int64_t dim_qk, dim_v;
  std::int64_t v_stride;           // numbers from a head's v to the next head's; a token's are num_heads times that
  std::int64_t max_documents = 0;  // 0: whole sequences
  float scale;
  bool deterministic = false;  // of the backward

  std::int64_t num_tokens() const { return num_seqs * seq_len; }
  bool operator==(const AttentionShape&) const = default;
};

/// Where the documents are, for N = max_documents of them: tokens of each, and offsets of their first numbers in the
/// operands, one more than there are documents. What is behind the last document has length 0.
struct DocumentTable {
  std::int32_t* lengths = nullptr;                                                     // [N]
  std::int64_t *of_qk = nullptr, *of_v = nullptr, *of_o = nullptr, *of_lse = nullptr;  // [N + 1]
};

struct AttentionOperands {
  void *q, *k, *v, *o;  // bfloat16: q, k, o contiguous [T, H, dim]; v as the shape says
  float* lse;           // forward, or with documents: [T, H]; backward of whole sequences: [B, H, S]
  // Backward: gradients in the layouts of what they are the gradients of.
  void *d_o = nullptr, *d_q = nullptr, *d_k = nullptr, *d_v = nullptr;
};

class AttentionLibrary {
 public:
  /// Throws Error where there is no cuDNN, or one that is too old.
  explicit AttentionLibrary(const Stream& stream);
  ~AttentionLibrary();
  AttentionLibrary(const AttentionLibrary&) = delete;
  AttentionLibrary& operator=(const AttentionLibrary&) = delete;

  /// Whether cuDNN's kernels take these head dims and lengths.
  static bool supports(const AttentionShape& shape);
  /// Scratch that is enough for a pass, known without cuDNN; building its graph checks it.
  static std::size_t workspace_bytes(const AttentionShape& shape, bool backward);

  /// Builds a pass's graph unless it is there.
  void prepare(const AttentionShape& shape, bool backward);
  void forward(const AttentionShape& shape, const AttentionOperands& operands, const DocumentTable& documents,
               std::byte* workspace);
  void backward(const AttentionShape& shape, const AttentionOperands& operands, const DocumentTable& documents,
                std::byte* workspace);

 private:
  struct Implementation;
  std::unique_ptr<Implementation> implementation_;
};

}  // namespace tessera::cuda
