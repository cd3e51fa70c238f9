#include "ep/domain_plan.h"

#include "ops/kit/checks.h"
#include "ops/runtime/backends.h"
#include "tensor/dims.h"

namespace tessera {

TESSERA_BACKENDS(find_domains)
TESSERA_BACKENDS(take_all_domains)
TESSERA_BACKENDS(place_choices)
TESSERA_BACKENDS(localize_experts)

void find_domains(const Context& context, const Tensor& expert_ids_TK, std::int64_t experts_per_domain,
                  const Tensor& domain_TN, const Tensor& num_tokens_N) {
  TESSERA_DIMS(expert_ids_TK, domain_TN, num_tokens_N);
  const std::int64_t num_tokens = expert_ids_TK.dim(0), num_domains = num_tokens_N.dim(0);
  TESSERA_CHECK(experts_per_domain > 0, "{}", experts_per_domain);
  TESSERA_CHECK_TENSOR(expert_ids_TK, DType::kInt32, {num_tokens, expert_ids_TK.dim(1)});
  TESSERA_CHECK_TENSOR(domain_TN, DType::kInt32, {num_tokens, num_domains});
  TESSERA_CHECK_TENSOR(num_tokens_N, DType::kInt32, {num_domains});
  TESSERA_RUN(find_domains, context, expert_ids_TK, experts_per_domain, domain_TN, num_tokens_N);
}

void take_all_domains(const Context& context, const Tensor& domain_TN, const Tensor& num_tokens_N) {
  TESSERA_DIMS(domain_TN, num_tokens_N);
  const std::int64_t num_domains = num_tokens_N.dim(0);
  TESSERA_CHECK_TENSOR(domain_TN, DType::kInt32, {domain_TN.dim(0), num_domains});
  TESSERA_CHECK_TENSOR(num_tokens_N, DType::kInt32, {num_domains});
  TESSERA_RUN(take_all_domains, context, domain_TN, num_tokens_N);
}

void place_choices(const Context& context, const Tensor& expert_ids_TK, std::int64_t experts_per_domain,
                   const Tensor& sent_of_token_TN, const Tensor& number_of_slot_TK) {
  TESSERA_DIMS(expert_ids_TK, sent_of_token_TN, number_of_slot_TK);
  const std::int64_t num_tokens = expert_ids_TK.dim(0);
  TESSERA_CHECK(experts_per_domain > 0, "{}", experts_per_domain);
  for (const Tensor& x_TK : {expert_ids_TK, number_of_slot_TK}) {
    TESSERA_CHECK_TENSOR(x_TK, DType::kInt32, {num_tokens, expert_ids_TK.dim(1)});
  }
  TESSERA_CHECK_TENSOR(sent_of_token_TN, DType::kInt32, {num_tokens, sent_of_token_TN.dim(1)});
  TESSERA_RUN(place_choices, context, expert_ids_TK, experts_per_domain, sent_of_token_TN, number_of_slot_TK);
}

void localize_experts(const Context& context, std::int64_t first_expert, const Tensor& num_received_N,
                      const Tensor& expert_ids_MK, const Tensor& counts_E) {
  TESSERA_DIMS(num_received_N, expert_ids_MK, counts_E);
  TESSERA_CHECK(first_expert >= 0, "{}", first_expert);
  TESSERA_CHECK_TENSOR(num_received_N, DType::kInt32, {num_received_N.dim(0)});
  TESSERA_CHECK_TENSOR(expert_ids_MK, DType::kInt32, {expert_ids_MK.dim(0), expert_ids_MK.dim(1)});
  TESSERA_CHECK_TENSOR(counts_E, DType::kInt32, {counts_E.dim(0)});
  TESSERA_RUN(localize_experts, context, first_expert, num_received_N, expert_ids_MK, counts_E);
}

}  // namespace tessera
