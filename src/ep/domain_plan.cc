#include "ep/domain_plan.h"

#include "ops/kit/checks.h"
#include "ops/runtime/backends.h"
#include "tensor/dims.h"

namespace tessera {

TESSERA_BACKENDS(plan_crossing)
TESSERA_BACKENDS(localize_experts)

void plan_crossing(const Context& context, const Tensor& expert_ids_TK, std::int64_t experts_per_domain,
                   const Crossing& crossing) {
  TESSERA_DIMS(expert_ids_TK, crossing.token_of_sent_M, crossing.sent_of_token_TN, crossing.number_of_slot_TK,
               crossing.num_sent_N);
  const std::int64_t num_tokens = expert_ids_TK.dim(0), num_domains = crossing.num_sent_N.dim(0);
  TESSERA_CHECK(experts_per_domain > 0, "{}", experts_per_domain);
  for (const Tensor& x_TK : {expert_ids_TK, crossing.number_of_slot_TK}) {
    TESSERA_CHECK_TENSOR(x_TK, DType::kInt32, {num_tokens, expert_ids_TK.dim(1)});
  }
  TESSERA_CHECK_TENSOR(crossing.token_of_sent_M, DType::kInt32, {num_domains * num_tokens});
  TESSERA_CHECK_TENSOR(crossing.sent_of_token_TN, DType::kInt32, {num_tokens, num_domains});
  TESSERA_CHECK_TENSOR(crossing.num_sent_N, DType::kInt32, {num_domains});
  TESSERA_RUN(plan_crossing, context, expert_ids_TK, experts_per_domain, crossing);
}

void localize_experts(const Context& context, std::int64_t first_expert, const Tensor& num_received_N,
                      const Tensor& expert_ids_MK, const Tensor& counts_E) {
  TESSERA_DIMS(num_received_N, expert_ids_MK, counts_E);
  TESSERA_CHECK(first_expert >= 0, "{}", first_expert);
  TESSERA_CHECK_TENSOR(num_received_N, DType::kInt32, {num_received_N.dim(0)});
  TESSERA_CHECK(expert_ids_MK.dim(0) % num_received_N.dim(0) == 0, "{} tokens in {} parts", expert_ids_MK.dim(0),
                num_received_N.dim(0));
  TESSERA_CHECK_TENSOR(expert_ids_MK, DType::kInt32, {expert_ids_MK.dim(0), expert_ids_MK.dim(1)});
  TESSERA_CHECK_TENSOR(counts_E, DType::kInt32, {counts_E.dim(0)});
  TESSERA_RUN(localize_experts, context, first_expert, num_received_N, expert_ids_MK, counts_E);
}

}  // namespace tessera
