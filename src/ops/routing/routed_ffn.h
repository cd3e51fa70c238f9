// The routed experts of a few tokens, in one call, for decoding. A layer that is trained has a dispatcher
// (ep/dispatcher.h), and keeps what its backward needs.
#pragma once

#include "ops/runtime/context.h"

namespace tessera {

/// Holds the experts, and what a router chose for T tokens (ops/routing/router.h). All are on this device.
struct RoutedFfn {
  Tensor w13_E2FD;       // gate, then up (ops/elementwise/swiglu.h)
  Tensor w2_EDF;         // down
  Tensor expert_ids_TK;  // int32
  Tensor weights_TK;     // float32
  Tensor counts_E;       // int32
};

/// Assigns to out_TD the sum over a token's choices k, in their order, of weight_k · W2 · swiglu(W13 · y). y, the
/// weights and `out` have one type, float32 or bfloat16. An expert's hidden numbers and outputs are rounded to it. Sums
/// are in float32. On a GPU, up to 8 tokens read each weight without sorting the choices.
void routed_ffn(const Context& context, const Tensor& y_TD, const RoutedFfn& experts, const Tensor& out_TD);

/// Computes the same by other operators: sorts the choices, multiplies the rows of each expert, and combines them. CPUs
/// do it so, and GPUs for more tokens.
void routed_ffn_by_operators(const Context& context, const Tensor& y_TD, const RoutedFfn& experts,
                             const Tensor& out_TD);

}  // namespace tessera
