// Collectives over tokens. Tokens are sharded over ranks. Layers and their sites call these when they need other ranks'
// tokens.
#pragma once

#include <string_view>

#include "model/layer_context.h"

namespace tessera {

/// Names the sets of tokens that several ranks share. A rank has t of them between layers.
enum class TokenSet : std::uint8_t {
  kMicroBatch,  // T: those of the micro-batch, which tensor-parallel ranks share
  kSequences,   // K: those of its whole sequences, which context-parallel ranks share as well; keys are
                // computed for all of them
};

// In all functions below, `name` says for whom tokens move. Messages quote it.

/// Returns whether other ranks have some of these tokens.
bool are_sharded(const LayerContext& context, TokenSet tokens);
/// Returns T or K.
std::int64_t num_tokens(const LayerContext& context, TokenSet tokens);
/// Gathers the ranks' x_tN into out, in the order of the tokens. The tokens must be sharded.
void all_gather(const LayerContext& context, TokenSet tokens, const Tensor& x_tN, const Tensor& out,
                std::string_view name);
/// Assigns or adds to out_tN this rank's tokens of the sum of all ranks' `partial`. The tokens must be sharded.
void reduce_scatter(const LayerContext& context, TokenSet tokens, const Tensor& partial, const Tensor& out_tN,
                    Write write, std::string_view name);

/// Returns this rank's tokens of the sum of all ranks' `partial`. If they are not sharded, that is `partial` itself.
Tensor reduce_scatter(const LayerContext& context, TokenSet tokens, const Tensor& partial, std::string_view name);
/// Returns the T tokens of the micro-batch. If they are not sharded, that is x_tN itself.
Tensor gather_tokens(const LayerContext& context, const Tensor& x_tN, std::string_view name);

/// compute(target, write) computes a partial result for all tokens. This function sums it over the ranks, and assigns
/// or adds this rank's tokens to out_tN. If tokens are not sharded, compute() writes to out_tN itself.
template <typename Compute>
void sum_over_ranks(const LayerContext& context, TokenSet tokens, const Tensor& out_tN, Write write,
                    std::string_view name, Compute&& compute) {
  if (!are_sharded(context, tokens)) return compute(out_tN, write);
  const ArenaScope scope(*context.op.arena);
  const Tensor partial = context.allocate({num_tokens(context, tokens), out_tN.dim(1)});
  compute(partial, Write::kAssign);
  reduce_scatter(context, tokens, partial, out_tN, write, name);
}

}  // namespace tessera
