// Attention by plain kernels, in float32 arithmetic: for float32 operands, head dims that cuDNN does not take, queries
// that are part of a sequence, and documents that the table of cuDNN cannot hold. Results do not depend on timing.
#pragma once

#include "ops/attention/mla_attention.h"

namespace tessera::cuda {

/// Operands of these kernels. k_KHN: [K, H, nope + rope], of the type of q. `enabled`: if not null, an int on the GPU;
/// while it is 0 the kernels do nothing.
struct PlainAttention {
  const MlaDims& dims;
  Tensor q, k_KHN, kv, doc_start_T, o, lse_TH;
  const std::int32_t* enabled = nullptr;
};

/// Whether the head dims fit in the kernels' tiles.
bool plain_attention_fits(const MlaDims& dims);
void plain_attention_forward(const Context& op, const PlainAttention& x);
/// Writes d_q, d_k_KHN and the d_v of d_kv. delta_TH: float32 scratch.
void plain_attention_backward(const Context& op, const PlainAttention& x, const Tensor& d_o, const Tensor& d_q,
                              const Tensor& d_k_KHN, const Tensor& d_kv, const Tensor& delta_TH);

}  // namespace tessera::cuda
