#include "ops/routing/moe_decode.h"

#include "ops/elementwise/elementwise.h"
#include "ops/elementwise/swiglu.h"
#include "ops/gemm/gemm.h"
#include "ops/gemm/grouped_gemm.h"
#include "ops/kit/checks.h"
#include "ops/routing/permute.h"
#include "ops/runtime/backends.h"
#include "tensor/dims.h"

namespace tessera {

TESSERA_BACKENDS(moe_decode)

void moe_decode(const Context& context, const Tensor& x_TD, const Tensor& y_TD, const MoeDecodeOperands& experts,
                const Tensor& out_TD) {
  const TraceScope trace(context.trace, "moe_decode");
  const Tensor &expert_ids_TK = experts.expert_ids_TK, &weights_TK = experts.weights_TK, &counts_E = experts.counts_E;
  const Tensor &w13_E2FD = experts.w13_E2FD, &w2_EDF = experts.w2_EDF;
  const Tensor &shared_w13_2ID = experts.shared_w13_2ID, &shared_w2_DI = experts.shared_w2_DI;
  TESSERA_DIMS(x_TD, y_TD, expert_ids_TK, weights_TK, counts_E, w13_E2FD, w2_EDF, shared_w13_2ID, shared_w2_DI, out_TD);
  const DType dtype = y_TD.dtype();
  const std::int64_t num_tokens = y_TD.dim(0), dim = y_TD.dim(1), top_k = expert_ids_TK.dim(1);
  const std::int64_t num_experts = w2_EDF.dim(0), hidden = w2_EDF.dim(2);
  TESSERA_CHECK_TENSOR(x_TD, dtype, {num_tokens, dim});
  TESSERA_CHECK_TENSOR(y_TD, dtype, {num_tokens, dim});
  TESSERA_CHECK_TENSOR(w13_E2FD, dtype, {num_experts, 2 * hidden, dim});
  TESSERA_CHECK_TENSOR(w2_EDF, dtype, {num_experts, dim, hidden});
  TESSERA_CHECK(shared_w13_2ID.defined() == shared_w2_DI.defined());
  if (shared_w2_DI.defined()) {
    const std::int64_t shared_hidden = shared_w2_DI.dim(1);
    TESSERA_CHECK(shared_hidden % hidden == 0, "{} shared, {} routed", shared_hidden, hidden);
    TESSERA_CHECK_TENSOR(shared_w13_2ID, dtype, {2 * shared_hidden, dim});
    TESSERA_CHECK_TENSOR(shared_w2_DI, dtype, {dim, shared_hidden});
  }
  TESSERA_CHECK_TENSOR(expert_ids_TK, DType::kInt32, {num_tokens, top_k});
  TESSERA_CHECK_TENSOR(weights_TK, DType::kFloat32, {num_tokens, top_k});
  TESSERA_CHECK_TENSOR(counts_E, DType::kInt32, {num_experts});
  TESSERA_CHECK_TENSOR(out_TD, dtype, {num_tokens, dim});
  TESSERA_RUN(moe_decode, context, x_TD, y_TD, experts, out_TD);
}

void shared_experts_by_operators(const Context& context, const Tensor& y_TD, const MoeDecodeOperands& experts,
                                 const Tensor& out_TD) {
  const std::int64_t num_tokens = y_TD.dim(0), hidden = experts.shared_w2_DI.dim(1);
  const ArenaScope scope(*context.arena);
  const Tensor h_T2I = context.arena->allocate({num_tokens, 2 * hidden}, y_TD.dtype());
  const Tensor a_TI = context.arena->allocate({num_tokens, hidden}, y_TD.dtype());
  linear_forward(context, y_TD, experts.shared_w13_2ID, h_T2I);
  swiglu_forward(context, h_T2I, a_TI);
  linear_forward(context, a_TI, experts.shared_w2_DI, out_TD);
}

void moe_decode_by_operators(const Context& context, const Tensor& x_TD, const Tensor& y_TD,
                             const MoeDecodeOperands& experts, const Tensor& out_TD) {
  const std::int64_t num_slots = experts.expert_ids_TK.num_elements(), top_k = experts.expert_ids_TK.dim(1);
  const std::int64_t num_experts = experts.w2_EDF.dim(0), hidden = experts.w2_EDF.dim(2);
  const ArenaScope scope(*context.arena);
  const auto allocate = [&](const Shape& shape, DType dtype) { return context.arena->allocate(shape, dtype); };
  const Tensor routed_TD = allocate(y_TD.shape(), y_TD.dtype());
  const Tensor offsets_E1 = allocate({num_experts + 1}, DType::kInt32);
  const Tensor slot_of_row_R = allocate({num_slots}, DType::kInt32);
  const Tensor row_of_slot_TK = allocate(experts.expert_ids_TK.shape(), DType::kInt32);
  const Tensor rows_RD = allocate({num_slots, y_TD.dim(1)}, y_TD.dtype());  // inputs, then outputs
  const Tensor h_R2F = allocate({num_slots, 2 * hidden}, y_TD.dtype());
  const Tensor a_RF = allocate({num_slots, hidden}, y_TD.dtype());
  sort_by_expert(context, experts.expert_ids_TK, experts.counts_E, /*alignment=*/1, offsets_E1, slot_of_row_R,
                 row_of_slot_TK);
  gather_rows(context, y_TD, slot_of_row_R, top_k, offsets_E1.rows(num_experts, num_experts + 1), rows_RD);
  grouped_linear_forward(context, rows_RD, experts.w13_E2FD, offsets_E1, h_R2F);
  swiglu_forward(context, h_R2F, a_RF);
  grouped_linear_forward(context, a_RF, experts.w2_EDF, offsets_E1, rows_RD);
  combine_rows(context, rows_RD, row_of_slot_TK, experts.weights_TK, routed_TD, Write::kAssign);
  Tensor shared_TD;
  if (experts.shared_w2_DI.defined()) {
    shared_TD = allocate(y_TD.shape(), y_TD.dtype());
    shared_experts_by_operators(context, y_TD, experts, shared_TD);
  }
  add(context, x_TD, routed_TD, out_TD, shared_TD);
}

}  // namespace tessera
