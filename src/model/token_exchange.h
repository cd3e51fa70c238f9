// Tokens are sharded over ranks. This is what layers call when they need more than their own.
#pragma once

#include "model/gemm_site.h"

namespace tessera {

// In all functions `name` says what moves, for messages.

/// Returns the forms in which a layer wants its rank's tokens [t, N], if the sites read all T tokens.
InputForms gathered_forms(const LayerContext& context, std::initializer_list<ParamId> sites);
/// Returns all T tokens in the forms of the sites. On one rank that is x_tN itself.
GemmOperand gather_tokens(const LayerContext& context, const GemmOperand& x_tN, const OperandForms& forms,
                          std::string_view name);
Tensor gather_tokens(const LayerContext& context, const Tensor& x_tN, std::string_view name);
/// Returns this rank's tokens of the sum of all ranks' partial_TN. On one rank that is partial_TN itself.
Tensor reduce_scatter_tokens(const LayerContext& context, const Tensor& partial_TN, std::string_view name);
/// Returns whether there are other tensor-parallel ranks. The next two functions are for that case only.
bool tokens_are_cut(const LayerContext& context);
void gather_tokens(const LayerContext& context, const Tensor& x_tN, const Tensor& out_TN, std::string_view name);
/// Assigns or adds to out_tN this rank's tokens of the sum of all ranks' partial_TN.
void reduce_scatter_tokens(const LayerContext& context, const Tensor& partial_TN, const Tensor& out_tN, Write write,
                           std::string_view name);

/// Assigns or adds to out_tN this rank's tokens of the sum over ranks of what compute(target, write) gives for all T
/// tokens. On one rank it computes into out_tN.
template <typename Compute>
void sum_tokens(const LayerContext& context, const Tensor& out_tN, Write write, std::string_view name,
                Compute&& compute) {
  if (!tokens_are_cut(context)) return compute(out_tN, write);
  const ArenaScope scope(*context.op.arena);
  const Tensor partial_TN = context.allocate({context.num_tokens(), out_tN.dim(1)});
  compute(partial_TN, Write::kAssign);
  reduce_scatter_tokens(context, partial_TN, out_tN, write, name);
}

/// Assigns or adds x_TN · wᵀ to y_tM, for a site whose inputs are sharded over the ranks.
void row_parallel_forward(const LayerContext& context, const GemmOperand& x_TN, ParamId site, const Tensor& y_tM,
                          Write write = Write::kAssign);
/// Assigns or adds d_y_TM · w to d_x_tN, for a site whose outputs are sharded over the ranks.
void column_parallel_dgrad(const LayerContext& context, const GemmOperand& d_y_TM, ParamId site, const Tensor& d_x_tN,
                           Write write = Write::kAssign);

/// Returns this rank's rows [t, N] of the sum of all ranks' partial_KN. On one rank that is partial_KN itself.
Tensor reduce_scatter_keys(const LayerContext& context, const Tensor& partial_KN, std::string_view name);
/// Returns whether other ranks have some of the keys' tokens. The next function is for that case only.
bool keys_are_cut(const LayerContext& context);
/// Gathers the ranks' rows into all keys' rows, sequence by sequence.
void gather_keys(const LayerContext& context, const Tensor& x_tN, const Tensor& out_KN, std::string_view name);
}  // namespace tessera
