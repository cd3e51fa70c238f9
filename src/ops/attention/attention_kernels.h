// Plain kernels for attention, which compute in float32. They take the cases that cuDNN does not take:
// - float32 operands;
// - head dims that cuDNN does not support;
// - queries that are only a part of their sequence;
// - documents that do not fit into cuDNN's table.
// The results do not depend on timing.
#pragma once

#include "ops/attention/mla_attention.h"

namespace tessera::cuda {

/// Holds the operands of the kernels. They compute G heads, from `first_head` on. k_KGN has the keys of these alone. It
/// is [K, G, nope + rope] and has the type of q. The other tensors are those of ops/attention/mla_attention.h, with all
/// H heads. `enabled` is null or points to an int on the GPU. While this int is 0, the kernels do nothing.
struct PlainAttention {
  const MlaDims& dims;
  std::int64_t first_head;
  Tensor q, k_KGN, kv, doc_start_T, o, lse_TH;
  const std::int32_t* enabled = nullptr;
};

/// Returns whether the head dims fit into the kernels' tiles.
bool plain_attention_fits(const MlaDims& dims);
/// Assigns the G heads of o and lse_TH.
void plain_attention_forward(const Context& op, const PlainAttention& x);
/// Assigns the sums of o · d_o of all H heads to delta_TH, which is float32. x may have any group of heads.
void plain_attention_delta(const Context& op, const PlainAttention& x, const Tensor& d_o, const Tensor& delta_TH);
/// Writes d_q, d_k_KGN, and the columns of d_kv that are the gradient of v. delta_TH is from plain_attention_delta.
void plain_attention_backward(const Context& op, const PlainAttention& x, const Tensor& d_o, const Tensor& d_q,
                              const Tensor& d_k_KGN, const Tensor& d_kv, const Tensor& delta_TH);

}  // namespace tessera::cuda
