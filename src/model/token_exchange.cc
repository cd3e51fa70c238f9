#include "model/token_exchange.h"

#include "ops/elementwise/embedding.h"

namespace tessera {
namespace {

/// The group's ranks' x, one behind the other.
void gather(const LayerContext& context, ProcessGroup& group, const Tensor& x, const Tensor& out,
            std::string_view name) {
  if (context.op.measuring()) return;
  const TraceScope trace(context.op.trace, "all_gather");
  group.all_gather(x, out, name).wait();
}

void reduce_scatter(const LayerContext& context, ProcessGroup& group, const Tensor& partial, const Tensor& out,
                    Write write, std::string_view name) {
  if (context.op.measuring()) return;
  const TraceScope trace(context.op.trace, "reduce_scatter");
  group.reduce_scatter(partial, out, write, name).wait();
}

/// out[i] = x[index[i]]: rows of x as of a table.
void reorder(const LayerContext& context, const Tensor& x, const Tensor& index, const Tensor& out) {
  embedding_forward(context.op, index, x, 0, out);
}

}  // namespace

bool tokens_are_cut(const LayerContext& context) { return context.mesh->tp.size() > 1; }

InputForms gathered_forms(const LayerContext& context, std::initializer_list<ParamId> sites) {
  if (!tokens_are_cut(context)) return input_forms(context, sites);
  return {.forward = {.plain = true}, .wgrad = {.plain = true}};
}

GemmOperand gather_tokens(const LayerContext& context, const GemmOperand& x_tN, const OperandForms& forms,
                          std::string_view name) {
  if (!tokens_are_cut(context)) return x_tN;
  return quantized_operand(context, gather_tokens(context, x_tN.plain, name), forms);
}

Tensor gather_tokens(const LayerContext& context, const Tensor& x_tN, std::string_view name) {
  if (!tokens_are_cut(context)) return x_tN;
  const Tensor out_TN = context.allocate({context.num_tokens(), x_tN.dim(1)}, x_tN.dtype());
  gather_tokens(context, x_tN, out_TN, name);
  return out_TN;
}

void gather_tokens(const LayerContext& context, const Tensor& x_tN, const Tensor& out_TN, std::string_view name) {
  gather(context, context.mesh->tp, x_tN, out_TN, name);
}

void reduce_scatter_tokens(const LayerContext& context, const Tensor& partial_TN, const Tensor& out_tN, Write write,
                           std::string_view name) {
  reduce_scatter(context, context.mesh->tp, partial_TN, out_tN, write, name);
}

Tensor reduce_scatter_tokens(const LayerContext& context, const Tensor& partial_TN, std::string_view name) {
  if (!tokens_are_cut(context)) return partial_TN;
  const Tensor sum_tN = context.allocate({context.num_local_tokens(), partial_TN.dim(1)}, partial_TN.dtype());
  reduce_scatter_tokens(context, partial_TN, sum_tN, Write::kAssign, name);
  return sum_tN;
}

void row_parallel_forward(const LayerContext& context, const GemmOperand& x_TN, ParamId site, const Tensor& y_tM,
                          Write write) {
  sum_tokens(context, y_tM, write, context.parameters->spec(site).name,
             [&](const Tensor& y, Write how) { linear_forward(context, x_TN, site, y, how); });
}

void column_parallel_dgrad(const LayerContext& context, const GemmOperand& d_y_TM, ParamId site, const Tensor& d_x_tN,
                           Write write) {
  sum_tokens(context, d_x_tN, write, context.parameters->spec(site).name,
             [&](const Tensor& d_x, Write how) { linear_dgrad(context, d_y_TM, site, d_x, how); });
}

bool keys_are_cut(const LayerContext& context) { return context.mesh->sequence.size() > 1; }

void gather_keys(const LayerContext& context, const Tensor& x_tN, const Tensor& out_KN, std::string_view name) {
  ProcessGroup& group = context.mesh->sequence;
  if (context.mesh->cp.size() == 1) return gather(context, group, x_tN, out_KN, name);
  const ArenaScope scope(*context.op.arena);
  const Tensor parts = context.allocate(out_KN.shape(), x_tN.dtype());
  gather(context, group, x_tN, parts, name);
  reorder(context, parts, context.batch->part_of_key(context.op.device()), out_KN);
}

Tensor reduce_scatter_keys(const LayerContext& context, const Tensor& partial_KN, std::string_view name) {
  if (!keys_are_cut(context)) return partial_KN;
  const Tensor sum_tN = context.allocate({context.num_local_tokens(), partial_KN.dim(1)}, partial_KN.dtype());
  const ArenaScope scope(*context.op.arena);
  Tensor parts = partial_KN;
  if (context.mesh->cp.size() > 1) {
    parts = context.allocate(partial_KN.shape(), partial_KN.dtype());
    reorder(context, partial_KN, context.batch->key_of_part(context.op.device()), parts);
  }
  reduce_scatter(context, context.mesh->sequence, parts, sum_tN, Write::kAssign, name);
  return sum_tN;
}

}  // namespace tessera
