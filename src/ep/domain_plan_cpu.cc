#include <algorithm>
#include <numeric>
#include <span>

#include "ep/domain_plan.h"
#include "ops/routing/permute.h"

namespace tessera::cpu {
namespace {

std::int32_t* entries(const Tensor& x) { return x.data<std::int32_t>(); }

}  // namespace

void find_domains(const Context& context, const Tensor& expert_ids_TK, std::int64_t experts_per_domain,
                  const Tensor& domain_TN, const Tensor& num_tokens_N) {
  if (context.measuring()) return;
  const std::int64_t top_k = expert_ids_TK.dim(1), num_domains = num_tokens_N.dim(0);
  std::fill_n(entries(domain_TN), domain_TN.num_elements(), kNoExpert);
  std::fill_n(entries(num_tokens_N), num_domains, 0);
  for (std::int64_t slot = 0; slot < expert_ids_TK.num_elements(); ++slot) {
    const std::int32_t expert = entries(expert_ids_TK)[slot];
    if (expert == kNoExpert) continue;
    const std::int64_t domain = expert / experts_per_domain;
    TESSERA_CHECK(0 <= expert && domain < num_domains, "slot {}: expert {}", slot, expert);
    std::int32_t& entry = entries(domain_TN)[slot / top_k * num_domains + domain];
    if (entry == kNoExpert) ++entries(num_tokens_N)[domain];
    entry = static_cast<std::int32_t>(domain);
  }
}

void take_all_domains(const Context& context, const Tensor& domain_TN, const Tensor& num_tokens_N) {
  if (context.measuring()) return;
  const std::int64_t num_domains = num_tokens_N.dim(0);
  for (std::int64_t i = 0; i < domain_TN.num_elements(); ++i) {
    entries(domain_TN)[i] = static_cast<std::int32_t>(i % num_domains);
  }
  std::fill_n(entries(num_tokens_N), num_domains, static_cast<std::int32_t>(domain_TN.dim(0)));
}

void place_choices(const Context& context, const Tensor& expert_ids_TK, std::int64_t experts_per_domain,
                   const Tensor& sent_of_token_TN, const Tensor& number_of_slot_TK) {
  if (context.measuring()) return;
  const std::int64_t top_k = expert_ids_TK.dim(1), num_domains = sent_of_token_TN.dim(1);
  for (std::int64_t slot = 0; slot < expert_ids_TK.num_elements(); ++slot) {
    const std::int32_t expert = entries(expert_ids_TK)[slot];
    std::int64_t number = -1;
    if (expert != kNoExpert) {
      const std::int32_t sent = entries(sent_of_token_TN)[slot / top_k * num_domains + expert / experts_per_domain];
      number = sent * top_k + slot % top_k;
    }
    entries(number_of_slot_TK)[slot] = static_cast<std::int32_t>(number);
  }
  const std::int64_t nowhere = sent_of_token_TN.num_elements();
  std::replace(entries(sent_of_token_TN), entries(sent_of_token_TN) + nowhere, -1, static_cast<std::int32_t>(nowhere));
}

void localize_experts(const Context& context, std::int64_t first_expert, const Tensor& num_received_N,
                      const Tensor& expert_ids_MK, const Tensor& counts_E) {
  if (context.measuring()) return;
  const std::span num_received(entries(num_received_N), static_cast<std::size_t>(num_received_N.dim(0)));
  const std::int64_t used = std::accumulate(num_received.begin(), num_received.end(), std::int64_t{0});
  std::fill_n(entries(counts_E), counts_E.dim(0), 0);
  for (std::int64_t slot = 0; slot < expert_ids_MK.num_elements(); ++slot) {
    std::int32_t& id = entries(expert_ids_MK)[slot];
    const std::int64_t local = id - first_expert;  // below 0 for kNoExpert
    const bool is_here = slot < used * expert_ids_MK.dim(1) && 0 <= local && local < counts_E.dim(0);
    id = is_here ? static_cast<std::int32_t>(local) : kNoExpert;
    if (is_here) ++entries(counts_E)[local];
  }
}

}  // namespace tessera::cpu
