#include <algorithm>

#include "ep/domain_plan.h"
#include "ops/routing/permute.h"

namespace tessera::cpu {
namespace {

std::int32_t* entries(const Tensor& x) { return x.data<std::int32_t>(); }

}  // namespace

void plan_crossing(const Context& context, const Tensor& expert_ids_TK, std::int64_t experts_per_domain,
                   const Crossing& crossing) {
  if (context.measuring()) return;
  const std::int64_t num_tokens = expert_ids_TK.dim(0), top_k = expert_ids_TK.dim(1);
  const std::int64_t num_domains = crossing.num_sent_N.dim(0), nowhere = num_domains * num_tokens;
  std::int32_t* token_of_sent = entries(crossing.token_of_sent_M);
  std::int32_t* num_sent = entries(crossing.num_sent_N);
  std::fill_n(token_of_sent, nowhere, -1);
  std::fill_n(entries(crossing.sent_of_token_TN), nowhere, static_cast<std::int32_t>(nowhere));
  std::fill_n(num_sent, num_domains, 0);
  for (std::int64_t slot = 0; slot < expert_ids_TK.num_elements(); ++slot) {
    const std::int32_t expert = entries(expert_ids_TK)[slot];
    entries(crossing.number_of_slot_TK)[slot] = -1;
    if (expert == kNoExpert) continue;
    const std::int64_t token = slot / top_k, domain = expert / experts_per_domain;
    TESSERA_CHECK(0 <= expert && domain < num_domains, "slot {}: expert {}", slot, expert);
    std::int32_t& place = entries(crossing.sent_of_token_TN)[token * num_domains + domain];
    if (place == nowhere) {
      place = static_cast<std::int32_t>(domain * num_tokens + num_sent[domain]++);
      token_of_sent[place] = static_cast<std::int32_t>(token);
    }
    entries(crossing.number_of_slot_TK)[slot] = static_cast<std::int32_t>(place * top_k + slot % top_k);
  }
}

void localize_experts(const Context& context, std::int64_t first_expert, const Tensor& num_received_N,
                      const Tensor& expert_ids_MK, const Tensor& counts_E) {
  if (context.measuring()) return;
  const std::int64_t top_k = expert_ids_MK.dim(1), part = expert_ids_MK.dim(0) / num_received_N.dim(0);
  std::fill_n(entries(counts_E), counts_E.dim(0), 0);
  for (std::int64_t slot = 0; slot < expert_ids_MK.num_elements(); ++slot) {
    std::int32_t& id = entries(expert_ids_MK)[slot];
    const std::int64_t local = id - first_expert;  // below 0 for kNoExpert
    const bool is_received = slot / top_k % part < entries(num_received_N)[slot / top_k / part];
    const bool is_here = is_received && 0 <= local && local < counts_E.dim(0);
    id = is_here ? static_cast<std::int32_t>(local) : kNoExpert;
    if (is_here) ++entries(counts_E)[local];
  }
}

}  // namespace tessera::cpu
