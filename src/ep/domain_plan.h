// Operators that plan on the device which tokens cross to which domain (ep/domain_exchange.h).
//
// All tensors are int32. N domains hold experts_per_domain experts each, in the order of the domains. Ids are those of
// all experts, or kNoExpert. A GPU takes up to 1024 domains, and 1024 experts per domain.
#pragma once

#include "ops/runtime/context.h"

namespace tessera {

/// Finds the domains that have experts of a token.
/// - Assigns to domain_TN, at [t][d], d if token t has an expert in domain d, and kNoExpert if not. Its entries can be
///   sorted by domain as slots are by expert (sort_by_expert).
/// - Assigns to num_tokens_N the number of tokens per domain.
void find_domains(const Context& context, const Tensor& expert_ids_TK, std::int64_t experts_per_domain,
                  const Tensor& domain_TN, const Tensor& num_tokens_N);

/// Assigns what find_domains does if every token has an expert in every domain: d to domain_TN[t][d], T to
/// num_tokens_N.
void take_all_domains(const Context& context, const Tensor& domain_TN, const Tensor& num_tokens_N);

/// Finds where the choices of tokens are among what is sent.
/// - Replaces -1 in sent_of_token_TN, the sorted entries' row_of_slot, by N·T.
/// - Assigns to number_of_slot_TK the place of a choice's number among the numbers of the tokens that are sent, K per
///   token. It is -1 if the choice has no expert.
void place_choices(const Context& context, const Tensor& expert_ids_TK, std::int64_t experts_per_domain,
                   const Tensor& sent_of_token_TN, const Tensor& number_of_slot_TK);

/// Makes the ids of tokens that a domain has received those of its own experts.
/// - Replaces an id in expert_ids_MK by its difference to first_expert, or by kNoExpert if that is not in [0, E). The
///   sum of num_received_N tokens have been received, and the other ones get kNoExpert.
/// - Assigns to counts_E the number of choices per expert of the domain.
void localize_experts(const Context& context, std::int64_t first_expert, const Tensor& num_received_N,
                      const Tensor& expert_ids_MK, const Tensor& counts_E);

}  // namespace tessera
