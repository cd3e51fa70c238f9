#include "model/token_exchange.h"

#include "ops/elementwise/embedding.h"

namespace tessera {
namespace {

ProcessGroup& group_of(const LayerContext& context, TokenSet tokens) {
  return tokens == TokenSet::kMicroBatch ? context.mesh().tp : context.mesh().sequence;
}

/// Context-parallel ranks have parts of sequences, which do not lie one behind the other in the gathered rows.
bool needs_reordering(const LayerContext& context, TokenSet tokens) {
  return tokens == TokenSet::kSequences && context.mesh().cp.size() > 1;
}

/// out[i] = x[index[i]]: rows of x as of a table.
void reorder(const LayerContext& context, const Tensor& x, const Tensor& index, const Tensor& out) {
  embedding_forward(context.op, index, x, 0, out);
}

}  // namespace

bool are_sharded(const LayerContext& context, TokenSet tokens) { return group_of(context, tokens).size() > 1; }

std::int64_t num_tokens(const LayerContext& context, TokenSet tokens) {
  return tokens == TokenSet::kMicroBatch ? context.num_tokens() : context.batch->num_seqs() * context.batch->seq_len();
}

void all_gather(const LayerContext& context, TokenSet tokens, const Tensor& x_tN, const Tensor& out,
                std::string_view name) {
  const auto gather = [&](const Tensor& target) {
    const TraceScope trace(context.op.trace, "all_gather");
    group_of(context, tokens).all_gather(x_tN, target, name).wait();
  };
  if (!needs_reordering(context, tokens)) return gather(out);
  const ArenaScope scope(*context.op.arena);
  const Tensor parts = context.allocate(out.shape(), x_tN.dtype());
  gather(parts);
  reorder(context, parts, context.batch->part_of_key(context.op.device()), out);
}

void reduce_scatter(const LayerContext& context, TokenSet tokens, const Tensor& partial, const Tensor& out_tN,
                    Write write, std::string_view name) {
  const ArenaScope scope(*context.op.arena);
  Tensor parts = partial;
  if (needs_reordering(context, tokens)) {
    parts = context.allocate(partial.shape(), partial.dtype());
    reorder(context, partial, context.batch->key_of_part(context.op.device()), parts);
  }
  const TraceScope trace(context.op.trace, "reduce_scatter");
  group_of(context, tokens).reduce_scatter(parts, out_tN, write, name).wait();
}

Tensor reduce_scatter(const LayerContext& context, TokenSet tokens, const Tensor& partial, std::string_view name) {
  if (!are_sharded(context, tokens)) return partial;
  const Tensor sum_tN = context.allocate({context.num_local_tokens(), partial.dim(1)}, partial.dtype());
  reduce_scatter(context, tokens, partial, sum_tN, Write::kAssign, name);
  return sum_tN;
}

Tensor gather_tokens(const LayerContext& context, const Tensor& x_tN, std::string_view name) {
  if (!are_sharded(context, TokenSet::kMicroBatch)) return x_tN;
  const Tensor out_TN = context.allocate({context.num_tokens(), x_tN.dim(1)}, x_tN.dtype());
  all_gather(context, TokenSet::kMicroBatch, x_tN, out_TN, name);
  return out_TN;
}

}  // namespace tessera
