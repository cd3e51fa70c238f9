#include "ops/routing/permute.h"

#include "ops/kit/checks.h"
#include "ops/runtime/backends.h"
#include "tensor/dims.h"

namespace tessera {

TESSERA_BACKENDS(sort_by_expert)
TESSERA_BACKENDS(gather_rows)
TESSERA_BACKENDS(gather_row_bytes)
TESSERA_BACKENDS(gather_numbers)
TESSERA_BACKENDS(combine_rows)
TESSERA_BACKENDS(combine_rows_by_rank)

void sort_by_expert(const Context& context, const Tensor& expert_ids_TK, const Tensor& counts_E, std::int64_t alignment,
                    const Tensor& offsets_E1, const Tensor& slot_of_row_R, const Tensor& row_of_slot_TK) {
  const TraceScope trace(context.trace, "sort_by_expert");
  TESSERA_DIMS(expert_ids_TK, counts_E, offsets_E1, slot_of_row_R, row_of_slot_TK);
  const std::int64_t num_slots = expert_ids_TK.num_elements(), num_experts = counts_E.dim(0);
  TESSERA_CHECK_TENSOR(expert_ids_TK, DType::kInt32, {expert_ids_TK.dim(0), expert_ids_TK.dim(1)});
  TESSERA_CHECK_TENSOR(counts_E, DType::kInt32, {num_experts});
  TESSERA_CHECK_TENSOR(offsets_E1, DType::kInt32, {num_experts + 1});
  TESSERA_CHECK_TENSOR(slot_of_row_R, DType::kInt32, {max_rows(num_slots, num_experts, alignment)});
  TESSERA_CHECK_TENSOR(row_of_slot_TK, DType::kInt32, {expert_ids_TK.dim(0), expert_ids_TK.dim(1)});
  TESSERA_RUN(sort_by_expert, context, expert_ids_TK, counts_E, alignment, offsets_E1, slot_of_row_R, row_of_slot_TK);
}

void gather_rows(const Context& context, const Tensor& x_TD, const Tensor& slot_of_row_R, std::int64_t top_k,
                 const Tensor& num_rows_1, const GemmOperand& y_RD) {
  const TraceScope trace(context.trace, "gather_rows");
  TESSERA_DIMS(x_TD, slot_of_row_R, num_rows_1, y_RD);
  TESSERA_CHECK_TENSOR(x_TD, x_TD.dtype(), {x_TD.dim(0), x_TD.dim(1)});
  TESSERA_CHECK_TENSOR(slot_of_row_R, DType::kInt32, {slot_of_row_R.dim(0)});
  TESSERA_CHECK_TENSOR(num_rows_1, DType::kInt32, {1});
  check_operand(y_RD, slot_of_row_R.dim(0), x_TD.dim(1), x_TD.dtype());
  TESSERA_RUN(gather_rows, context, x_TD, slot_of_row_R, top_k, num_rows_1, y_RD);
}

void gather_row_bytes(const Context& context, const Tensor& x, const Tensor& source, std::int64_t divisor,
                      const Tensor& y) {
  TESSERA_CHECK_TENSOR(x, x.dtype(), {x.dim(0), x.dim(1)});
  TESSERA_CHECK_TENSOR(source, DType::kInt32, {y.dim(0)});
  TESSERA_CHECK_TENSOR(y, x.dtype(), {y.dim(0), x.dim(1)});
  TESSERA_RUN(gather_row_bytes, context, x, source, divisor, y);
}

void gather_numbers(const Context& context, const Tensor& x, const Tensor& index, const Tensor& y) {
  const TraceScope trace(context.trace, "gather_numbers");
  TESSERA_CHECK(x.is_contiguous() && index.is_contiguous() && y.is_contiguous() && index.shape() == y.shape(), "{} {}",
                index.shape().to_string(), y.shape().to_string());
  TESSERA_CHECK(x.dtype() == DType::kFloat32 && index.dtype() == DType::kInt32 && y.dtype() == DType::kFloat32,
                "{} {} {}", name_of(x.dtype()), name_of(index.dtype()), name_of(y.dtype()));
  TESSERA_RUN(gather_numbers, context, x, index, y);
}

namespace {

void check_combined(const Tensor& x_RD, const Tensor& row_of_slot_TK, const Tensor& weights_TK, const Tensor& y_TD) {
  const std::int64_t num_tokens = row_of_slot_TK.dim(0), top_k = row_of_slot_TK.dim(1), dim = x_RD.dim(1);
  TESSERA_CHECK_TENSOR(x_RD, x_RD.dtype(), {x_RD.dim(0), dim});
  TESSERA_CHECK(x_RD.dim(0) >= num_tokens * top_k, "{} rows, {} slots", x_RD.dim(0), num_tokens * top_k);
  TESSERA_CHECK_TENSOR(row_of_slot_TK, DType::kInt32, {num_tokens, top_k});
  if (weights_TK.defined()) TESSERA_CHECK_TENSOR(weights_TK, DType::kFloat32, {num_tokens, top_k});
  TESSERA_CHECK_TENSOR(y_TD, x_RD.dtype(), {num_tokens, dim});
}

}  // namespace

void combine_rows(const Context& context, const Tensor& x_RD, const Tensor& row_of_slot_TK, const Tensor& weights_TK,
                  const Tensor& y_TD, Write write) {
  const TraceScope trace(context.trace, "combine_rows");
  TESSERA_DIMS(x_RD, row_of_slot_TK, weights_TK, y_TD);
  check_combined(x_RD, row_of_slot_TK, weights_TK, y_TD);
  TESSERA_RUN(combine_rows, context, x_RD, row_of_slot_TK, weights_TK, y_TD, write);
}

void combine_rows_by_rank(const Context& context, const Tensor& x_RD, const Tensor& row_of_slot_TK,
                          const Tensor& weights_TK, const Tensor& expert_ids_TK, std::int64_t experts_per_rank,
                          const Tensor& y_TD, Write write) {
  const TraceScope trace(context.trace, "combine_rows");
  TESSERA_DIMS(x_RD, row_of_slot_TK, weights_TK, expert_ids_TK, y_TD);
  check_combined(x_RD, row_of_slot_TK, weights_TK, y_TD);
  TESSERA_CHECK_TENSOR(expert_ids_TK, DType::kInt32, {row_of_slot_TK.dim(0), row_of_slot_TK.dim(1)});
  TESSERA_CHECK(experts_per_rank > 0);
  TESSERA_RUN(combine_rows_by_rank, context, x_RD, row_of_slot_TK, weights_TK, expert_ids_TK, experts_per_rank, y_TD,
              write);
}

}  // namespace tessera
