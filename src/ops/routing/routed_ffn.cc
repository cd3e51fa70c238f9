#include "ops/routing/routed_ffn.h"

#include "ops/elementwise/swiglu.h"
#include "ops/gemm/grouped_gemm.h"
#include "ops/kit/checks.h"
#include "ops/routing/permute.h"
#include "ops/runtime/backends.h"
#include "tensor/dims.h"

namespace tessera {

TESSERA_BACKENDS(routed_ffn)

void routed_ffn(const Context& context, const Tensor& y_TD, const RoutedFfn& experts, const Tensor& out_TD) {
  const TraceScope trace(context.trace, "routed_ffn");
  const Tensor &expert_ids_TK = experts.expert_ids_TK, &weights_TK = experts.weights_TK, &counts_E = experts.counts_E;
  const Tensor &w13_E2FD = experts.w13_E2FD, &w2_EDF = experts.w2_EDF;
  TESSERA_DIMS(y_TD, expert_ids_TK, weights_TK, counts_E, w13_E2FD, w2_EDF, out_TD);
  const DType dtype = y_TD.dtype();
  const std::int64_t num_tokens = y_TD.dim(0), dim = y_TD.dim(1), top_k = expert_ids_TK.dim(1);
  const std::int64_t num_experts = w2_EDF.dim(0), hidden = w2_EDF.dim(2);
  TESSERA_CHECK_TENSOR(y_TD, dtype, {num_tokens, dim});
  TESSERA_CHECK_TENSOR(w13_E2FD, dtype, {num_experts, 2 * hidden, dim});
  TESSERA_CHECK_TENSOR(w2_EDF, dtype, {num_experts, dim, hidden});
  TESSERA_CHECK_TENSOR(expert_ids_TK, DType::kInt32, {num_tokens, top_k});
  TESSERA_CHECK_TENSOR(weights_TK, DType::kFloat32, {num_tokens, top_k});
  TESSERA_CHECK_TENSOR(counts_E, DType::kInt32, {num_experts});
  TESSERA_CHECK_TENSOR(out_TD, dtype, {num_tokens, dim});
  TESSERA_RUN(routed_ffn, context, y_TD, experts, out_TD);
}

void routed_ffn_by_operators(const Context& context, const Tensor& y_TD, const RoutedFfn& experts,
                             const Tensor& out_TD) {
  const std::int64_t num_slots = experts.expert_ids_TK.num_elements(), top_k = experts.expert_ids_TK.dim(1);
  const std::int64_t num_experts = experts.w2_EDF.dim(0), hidden = experts.w2_EDF.dim(2);
  const ArenaScope scope(*context.arena);
  const auto allocate = [&](const Shape& shape, DType dtype) { return context.arena->allocate(shape, dtype); };
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
  combine_rows(context, rows_RD, row_of_slot_TK, experts.weights_TK, out_TD, Write::kAssign);
}

}  // namespace tessera
