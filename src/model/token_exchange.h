// Tokens that are cut among ranks, and what layers do that need more than their own.
//
// Between layers a rank has t of its micro-batch's T tokens: tensor-parallel rank r those of [r · t, (r + 1) · t)
// (sequence parallelism, arXiv 2205.05198). A column-parallel layer reads all T tokens and computes a part of the
// outputs; a row-parallel one reads a part of the inputs, and its sum over the ranks goes to each token's rank. Under
// context parallelism these T are, in turn, a part of the sequences (model/batch.h), and attention needs the K = B · S
// keys of all.
//
// On one rank nothing moves: what is gathered is the operand itself, what is summed is written where it belongs.
#pragma once

#include "model/gemm_site.h"

namespace tessera {

// `name`: of what moves, for messages.

/// The forms in which a layer wants its rank's tokens [t, N], if the sites read all T of them.
InputForms gathered_forms(const LayerContext& context, std::initializer_list<ParamId> sites);
/// All T tokens, in the forms of the sites. On one rank x_tN itself.
GemmOperand gather_tokens(const LayerContext& context, const GemmOperand& x_tN, const OperandForms& forms,
                          std::string_view name);
Tensor gather_tokens(const LayerContext& context, const Tensor& x_tN, std::string_view name);
/// This rank's tokens of the sum of all ranks' partial_TN. On one rank partial_TN itself.
Tensor reduce_scatter_tokens(const LayerContext& context, const Tensor& partial_TN, std::string_view name);
/// Whether there are other tensor-parallel ranks; what follows is for that case only.
bool tokens_are_cut(const LayerContext& context);
void gather_tokens(const LayerContext& context, const Tensor& x_tN, const Tensor& out_TN, std::string_view name);
/// out_tN (= or +=) this rank's tokens of the sum of all ranks' partial_TN.
void reduce_scatter_tokens(const LayerContext& context, const Tensor& partial_TN, const Tensor& out_tN, Write write,
                           std::string_view name);

/// out_tN (= or +=) this rank's tokens of the sum of what compute(target, write) gives on each rank, of all T tokens.
/// On one rank it computes into out_tN.
template <typename Compute>
void sum_tokens(const LayerContext& context, const Tensor& out_tN, Write write, std::string_view name,
                Compute&& compute) {
  if (!tokens_are_cut(context)) return compute(out_tN, write);
  const ArenaScope scope(*context.op.arena);
  const Tensor partial_TN = context.allocate({context.num_tokens(), out_tN.dim(1)});
  compute(partial_TN, Write::kAssign);
  reduce_scatter_tokens(context, partial_TN, out_tN, write, name);
}

/// y_tM (= or +=) x_TN · wᵀ, for a site whose inputs are cut among the ranks.
void row_parallel_forward(const LayerContext& context, const GemmOperand& x_TN, ParamId site, const Tensor& y_tM,
                          Write write = Write::kAssign);
/// d_x_tN (= or +=) d_y_TM · w, for a site whose outputs are cut among the ranks.
void column_parallel_dgrad(const LayerContext& context, const GemmOperand& d_y_TM, ParamId site, const Tensor& d_x_tN,
                           Write write = Write::kAssign);

/// This rank's rows of the sum of all ranks' partial_KN: [t, N]. On one rank partial_KN itself.
Tensor reduce_scatter_keys(const LayerContext& context, const Tensor& partial_KN, std::string_view name);
/// Whether other ranks have some of the keys' tokens; what follows is for that case only.
bool keys_are_cut(const LayerContext& context);
/// All keys' rows, sequence by sequence, from the ranks' rows.
void gather_keys(const LayerContext& context, const Tensor& x_tN, const Tensor& out_KN, std::string_view name);
}  // namespace tessera
