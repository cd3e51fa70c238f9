#include "ep/exchange_plan.h"

#include "ops/kit/checks.h"
#include "ops/runtime/backends.h"
#include "tensor/dims.h"

namespace tessera {

TESSERA_BACKENDS(place_round)
TESSERA_BACKENDS(keep_round)
TESSERA_BACKENDS(plan_exchange)

void place_round(const Context& context, const Tensor& counts_PE, std::int64_t alignment, std::int64_t round,
                 std::int64_t room, const Tensor& first_row_PE, const Tensor& num_rounds_1) {
  TESSERA_DIMS(counts_PE, first_row_PE, num_rounds_1);
  const Shape shape{counts_PE.dim(0), counts_PE.dim(1)};
  TESSERA_CHECK(shape[1] % shape[0] == 0 && alignment > 0 && round >= 0 && room > 0 && room % alignment == 0,
                "{}, alignment {}, round {} of {} rows", shape.to_string(), alignment, round, room);
  for (const Tensor& x_PE : {counts_PE, first_row_PE}) TESSERA_CHECK_TENSOR(x_PE, DType::kInt32, {shape[0], shape[1]});
  TESSERA_CHECK_TENSOR(num_rounds_1, DType::kInt32, {1});
  TESSERA_RUN(place_round, context, counts_PE, alignment, round, room, first_row_PE, num_rounds_1);
}

void keep_round(const Context& context, const Tensor& expert_ids_TK, const Tensor& counts_E, const Tensor& first_row_E,
                std::int64_t room, const Tensor& round_ids_TK, const Tensor& kept_E) {
  TESSERA_DIMS(expert_ids_TK, counts_E, first_row_E, round_ids_TK, kept_E);
  for (const Tensor& ids_TK : {expert_ids_TK, round_ids_TK}) {
    TESSERA_CHECK_TENSOR(ids_TK, DType::kInt32, {expert_ids_TK.dim(0), expert_ids_TK.dim(1)});
  }
  for (const Tensor& x_E : {counts_E, first_row_E, kept_E}) {
    TESSERA_CHECK_TENSOR(x_E, DType::kInt32, {counts_E.dim(0)});
  }
  TESSERA_RUN(keep_round, context, expert_ids_TK, counts_E, first_row_E, room, round_ids_TK, kept_E);
}

void plan_exchange(const Context& context, const Tensor& counts_PE, const Tensor& first_row_PE, std::int64_t rank,
                   std::int64_t alignment, const Tensor& offsets_e1, const Tensor& source_of_row_R,
                   const Tensor& row_of_received_R, const Tensor& num_sent_P, const Tensor& num_received_P) {
  TESSERA_DIMS(counts_PE, first_row_PE, offsets_e1, source_of_row_R, row_of_received_R, num_sent_P, num_received_P);
  const std::int64_t num_ranks = counts_PE.dim(0), num_experts = counts_PE.dim(1), room = source_of_row_R.dim(0);
  TESSERA_CHECK(num_experts % num_ranks == 0 && 0 <= rank && rank < num_ranks && room % alignment == 0,
                "{} experts, rank {} of {}, {} rows, alignment {}", num_experts, rank, num_ranks, room, alignment);
  for (const Tensor& x_PE : {counts_PE, first_row_PE}) {
    TESSERA_CHECK_TENSOR(x_PE, DType::kInt32, {num_ranks, num_experts});
  }
  TESSERA_CHECK_TENSOR(offsets_e1, DType::kInt32, {num_experts / num_ranks + 1});
  for (const Tensor& x_R : {source_of_row_R, row_of_received_R}) TESSERA_CHECK_TENSOR(x_R, DType::kInt32, {room});
  for (const Tensor& x_P : {num_sent_P, num_received_P}) TESSERA_CHECK_TENSOR(x_P, DType::kInt32, {num_ranks});
  TESSERA_RUN(plan_exchange, context, counts_PE, first_row_PE, rank, alignment, offsets_e1, source_of_row_R,
              row_of_received_R, num_sent_P, num_received_P);
}

}  // namespace tessera
