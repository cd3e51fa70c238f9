// The experts of an MoE layer for a few tokens, in one call, for decoding. A layer that is trained has a dispatcher
// (ep/dispatcher.h), and keeps what its backward needs.
#pragma once

#include "ops/runtime/context.h"

namespace tessera {

/// Holds the experts, and what a router chose for T tokens (ops/routing/router.h). All are on this device. The shared
/// experts are one network of I hidden numbers, I a multiple of F. Without any, its tensors are undefined.
struct MoeDecodeOperands {
  Tensor w13_E2FD;        // gate, then up (ops/elementwise/swiglu.h)
  Tensor w2_EDF;          // down
  Tensor shared_w13_2ID;  // of the shared experts
  Tensor shared_w2_DI;
  Tensor expert_ids_TK;  // int32, from 0 to E - 1. A GPU does not check them
  Tensor weights_TK;     // float32
  Tensor counts_E;       // int32
};

/// Assigns to out_TD the sum of x, the routed experts' output and that of the shared experts. The routed experts'
/// output is the sum over a token's choices k, in their order, of weight_k · W2 · swiglu(W13 · y). x, y, the weights
/// and `out` have one type, float32 or bfloat16. Hidden numbers, each expert's output and both sums of experts are
/// rounded to it. Sums are in float32. On a GPU, choices of up to 4 tokens are not sorted. For one token the same
/// kernels compute the shared experts.
void moe_decode(const Context& context, const Tensor& x_TD, const Tensor& y_TD, const MoeDecodeOperands& experts,
                const Tensor& out_TD);

/// Computes the same by other operators: sorts the choices, multiplies the rows of each expert, and combines them. CPUs
/// do it so, and GPUs for more tokens.
void moe_decode_by_operators(const Context& context, const Tensor& x_TD, const Tensor& y_TD,
                             const MoeDecodeOperands& experts, const Tensor& out_TD);

/// Assigns to out_TD the shared experts' output, by other operators.
void shared_experts_by_operators(const Context& context, const Tensor& y_TD, const MoeDecodeOperands& experts,
                                 const Tensor& out_TD);

}  // namespace tessera
