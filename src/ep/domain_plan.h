// Operators that plan on the device which tokens cross to which domain (ep/domain_exchange.h).
//
// All tensors are int32. N domains hold experts_per_domain experts each, in the order of the domains. Ids are those of
// all experts, or kNoExpert. On a GPU, localize_experts takes up to 1024 experts per domain, and otherwise throws
// InternalError.
#pragma once

#include "ops/runtime/context.h"

namespace tessera {

/// What crosses between domains. T tokens have K choices each. What is sent has N parts of T places. The tokens that a
/// domain has experts of lie at the beginning of its part, in their order.
struct Crossing {
  Tensor token_of_sent_M;    // M = N·T: the token at a place, or -1 where there is none
  Tensor sent_of_token_TN;   // the inverse: the place of a token for a domain, or M if it is not sent there
  Tensor number_of_slot_TK;  // K · place + k, with the place of choice k for its expert's domain; -1 without an expert
  Tensor num_sent_N;         // tokens per domain
};

/// Assigns which tokens cross to which domains. A CPU throws InternalError for an expert that no domain has. A GPU
/// treats its id as kNoExpert.
void plan_crossing(const Context& context, const Tensor& expert_ids_TK, std::int64_t experts_per_domain,
                   const Crossing& crossing);

/// Converts the expert ids of the tokens that a domain has received. They become indices of the domain's own E experts.
/// - Replaces an id in expert_ids_MK by id - first_expert, or by kNoExpert if the difference is not in [0, E). Part n
///   of the M tokens has M/N places. Its first num_received_N[n] tokens have been received, and the other ones get
///   kNoExpert.
/// - Assigns to counts_E the number of choices per expert of the domain.
void localize_experts(const Context& context, std::int64_t first_expert, const Tensor& num_received_N,
                      const Tensor& expert_ids_MK, const Tensor& counts_E);

}  // namespace tessera
