#include "ep/backends/two_level_dispatcher.h"

#include <array>
#include <numeric>

#include "ep/backends/make_dispatcher.h"
#include "ep/host_plan.h"
#include "ep/placement.h"
#include "ops/elementwise/elementwise.h"
#include "ops/routing/permute.h"

namespace tessera::ep {
namespace {

/// All tensors are int32. There are N domains. Up to N·t tokens cross between domains each way. A token crosses once
/// per domain.
struct TwoLevelRouting {
  /// This rank's tokens in the order in which they are sent, domain by domain.
  Tensor token_of_sent_Nt;
  /// sent_of_token: place of a token among those sent to a domain; N·t if it is not sent there. number_of_slot: place
  /// of a choice's number among the numbers, K per token, that come back; -1 if the choice is of another round.
  Tensor sent_of_token_tN, number_of_slot_tK;
  /// Numbers of tokens to each domain and from it, on the host.
  struct Counts {
    std::vector<std::int64_t> num_sent_N, num_received_N;
  };
  std::shared_ptr<Counts> counts;
  /// The dispatch within the domain, of the t' = N·t tokens that this rank received. It owns its routing.
  std::shared_ptr<DispatchSaved> within;
};

DispatchOptions options_within(DispatchOptions options, std::int64_t num_domains) {
  options.max_tokens *= num_domains;
  options.num_experts /= num_domains;
  options.num_domains = num_domains;
  return options;
}

const TwoLevelRouting& two_level_routing(const DispatchSaved& saved) { return saved.backend_as<TwoLevelRouting>(); }

/// Returns for each domain the tokens of a rank that have an expert in it, in the order of the tokens.
std::vector<Ints> tokens_of_domains(std::span<const std::int32_t> expert_ids_tK, std::int64_t top_k,
                                    std::int64_t num_domains, std::int64_t num_experts) {
  std::vector<Ints> tokens(static_cast<std::size_t>(num_domains));
  for (std::size_t slot = 0; slot < expert_ids_tK.size(); ++slot) {
    const std::int32_t expert = expert_ids_tK[slot];
    if (expert == kNoExpert) continue;
    const auto token = static_cast<std::int32_t>(slot / static_cast<std::size_t>(top_k));
    TESSERA_CHECK(0 <= expert && expert < num_experts, "token {}: expert {} of {}", token, expert, num_experts);
    Ints& domain_tokens = tokens[static_cast<std::size_t>(expert / (num_experts / num_domains))];
    if (domain_tokens.empty() || domain_tokens.back() != token) domain_tokens.push_back(token);
  }
  return tokens;
}

}  // namespace

TwoLevelDispatcher::TwoLevelDispatcher(const DispatchOptions& options, const DomainGroups& groups, StepHook* hook)
    : Dispatcher(options, groups.all.size()), groups_(groups) {
  const ProcessGroup &all = groups.all, &within = groups.within, &across = groups.across;
  TESSERA_CHECK(options.num_domains == 1 && all.size() == across.size() * within.size() &&
                    all.rank() == across.rank() * within.size() + within.rank(),
                "rank {} of {} is {} of {} in domain {} of {}", all.rank(), all.size(), within.rank(), within.size(),
                across.rank(), across.size());
  within_ = make_dispatcher(DispatchBackend::kDirect, groups.within, options_within(options, across.size()), hook);
}

void TwoLevelDispatcher::allocate_rows(const Context& op, DispatchSaved& saved) const {
  const std::int64_t num_tokens = num_tokens_within(saved), top_k = options().top_k;
  const TokenRouting routing{
      .expert_ids_tK = op.arena->allocate({num_tokens, top_k}, DType::kInt32),
      .weights_tK = op.arena->allocate({num_tokens, top_k}, DType::kFloat32),
      .counts_E = op.arena->allocate({within_->options().num_experts}, DType::kInt32),
  };
  auto& backend = saved.backend.emplace<TwoLevelRouting>();
  backend.within = std::make_shared<DispatchSaved>(within_->allocate_saved(op, saved.layer, routing));
  saved.offsets_e1 = backend.within->offsets_e1;
  saved.weights_R = backend.within->weights_R;
}

void TwoLevelDispatcher::allocate_backend(const Context& op, DispatchSaved& saved) const {
  const auto ints = [&](const Shape& shape) { return op.arena->allocate(shape, DType::kInt32); };
  auto& routing = std::any_cast<TwoLevelRouting&>(saved.backend);
  routing.token_of_sent_Nt = ints({num_tokens_within(saved)});
  routing.sent_of_token_tN = ints({saved.num_tokens(), num_domains()});
  routing.number_of_slot_tK = ints({saved.num_tokens(), options().top_k});
  routing.counts = std::make_shared<TwoLevelRouting::Counts>();
}

void TwoLevelDispatcher::plan(const Context& op, const DispatchSaved& saved) {
  const TwoLevelRouting& routing = two_level_routing(saved);
  const TokenRouting& within = routing.within->routing;
  const std::int64_t num_tokens = saved.num_tokens(), top_k = options().top_k, domains = num_domains();
  const std::int64_t num_experts = options().num_experts, num_experts_within = num_experts / domains;
  const HostPlacement placement = gather_placement(op, groups_.all, saved);
  const auto num_slots = static_cast<std::size_t>(num_tokens * top_k);
  Ints own_ids = fetch(op, saved.routing.expert_ids_tK), ids_NtK(num_slots * static_cast<std::size_t>(domains));
  groups_.across
      .all_gather(tensor_of(own_ids, {num_tokens, top_k}), tensor_of(ids_NtK, {domains * num_tokens, top_k}),
                  fmt::format("expert ids of {}", saved.layer.name))
      .wait();
  const auto keep_round_of = [&](std::int64_t rank, std::span<std::int32_t> ids_tK) {
    if (!is_cut(op, saved)) return;
    const auto first = static_cast<std::size_t>(rank * num_experts);
    keep_round(std::span(placement.first_row_PE).subspan(first, static_cast<std::size_t>(num_experts)),
               saved.num_rows(), ids_tK);
  };
  keep_round_of(groups_.all.rank(), own_ids);

  const auto slot_of = [&](std::int32_t token) { return static_cast<std::size_t>(token * top_k); };
  // This is what the rank sends.
  const auto nowhere = static_cast<std::int32_t>(num_tokens_within(saved));
  Ints token_of_sent, sent_of_token(static_cast<std::size_t>(num_tokens * domains), nowhere),
      number_of_slot(num_slots, -1);
  TwoLevelRouting::Counts& counts = *routing.counts;
  counts = {};
  std::int64_t domain = 0;
  for (const Ints& tokens : tokens_of_domains(own_ids, top_k, domains, num_experts)) {
    for (const std::int32_t t : tokens) {
      const auto sent = static_cast<std::int32_t>(token_of_sent.size());
      token_of_sent.push_back(t);
      sent_of_token[static_cast<std::size_t>(t * domains + domain)] = sent;
      for (std::size_t k = 0; k < static_cast<std::size_t>(top_k); ++k) {
        const std::int32_t expert = own_ids[slot_of(t) + k];
        if (expert == kNoExpert || expert / num_experts_within != domain) continue;
        number_of_slot[slot_of(t) + k] = static_cast<std::int32_t>(sent * top_k) + static_cast<std::int32_t>(k);
      }
    }
    counts.num_sent_N.push_back(static_cast<std::int64_t>(tokens.size()));
    ++domain;
  }
  // This is what arrives from the rank with the same place in each domain.
  const std::int64_t first_expert = groups_.across.rank() * num_experts_within;
  Ints ids, counts_E(static_cast<std::size_t>(num_experts_within), 0);
  for (std::size_t source = 0; source < static_cast<std::size_t>(domains); ++source) {
    const std::span theirs = std::span(ids_NtK).subspan(source * num_slots, num_slots);
    keep_round_of(static_cast<std::int64_t>(source) * groups_.within.size() + groups_.within.rank(), theirs);
    const std::vector<Ints> tokens = tokens_of_domains(theirs, top_k, domains, num_experts);
    const Ints& come = tokens[static_cast<std::size_t>(groups_.across.rank())];
    for (const std::int32_t t : come) {
      for (const std::int32_t expert : theirs.subspan(slot_of(t), static_cast<std::size_t>(top_k))) {
        const std::int64_t id = expert - first_expert;  // below 0 for kNoExpert
        const bool is_here = 0 <= id && id < num_experts_within;
        ids.push_back(is_here ? static_cast<std::int32_t>(id) : kNoExpert);
        if (is_here) ++counts_E[static_cast<std::size_t>(id)];
      }
    }
    counts.num_received_N.push_back(static_cast<std::int64_t>(come.size()));
  }
  ids.resize(static_cast<std::size_t>(within.expert_ids_tK.num_elements()), kNoExpert);
  put(op, token_of_sent, routing.token_of_sent_Nt);
  put(op, sent_of_token, routing.sent_of_token_tN);
  put(op, number_of_slot, routing.number_of_slot_tK);
  put(op, ids, within.expert_ids_tK);
  put(op, counts_E, within.counts_E);
}

Work TwoLevelDispatcher::to_domains(const Context& op, const Tensor& x, const Tensor& received,
                                    const DispatchSaved& saved, std::string_view operation) {
  const TwoLevelRouting& routing = two_level_routing(saved);
  const Tensor sent = op.arena->allocate(received.shape(), received.dtype());
  if (op.measuring()) return {};
  const auto& [num_sent_N, num_received_N] = *routing.counts;
  const std::int64_t num_sent = std::accumulate(num_sent_N.begin(), num_sent_N.end(), std::int64_t{0});
  gather_row_bytes(op, x, routing.token_of_sent_Nt.rows(0, num_sent), 1, sent.rows(0, num_sent));
  return groups_.across.all_to_all_v(sent, num_sent_N, received, num_received_N,
                                     fmt::format("{} of {}", operation, saved.layer.name));
}

Work TwoLevelDispatcher::from_domains(const Tensor& x, const Tensor& back, const DispatchSaved& saved,
                                      std::string_view operation) {
  const auto& [num_sent_N, num_received_N] = *two_level_routing(saved).counts;
  return groups_.across.all_to_all_v(x, num_received_N, back, num_sent_N,
                                     fmt::format("{} of {}", operation, saved.layer.name));
}

GemmOperand TwoLevelDispatcher::exchange_tokens(const Context& op, const GemmOperand& y_tD, PayloadPrecision precision,
                                                const DispatchSaved& saved, std::string_view operation) {
  const Payload tokens = make_payload(op, y_tD, precision);
  const Payload received =
      allocate_payload(num_tokens_within(saved), options().dim, options().dtype, precision,
                       [&](const Shape& shape, DType dtype) { return op.arena->allocate(shape, dtype); });
  std::array<Work, 2> work;
  for (std::size_t i = 0; i < work.size(); ++i) {
    if (!tokens.parts()[i].defined()) continue;
    work[i] = to_domains(op, tokens.parts()[i], received.parts()[i], saved, operation);
  }
  for (Work& part : work) part.wait();
  GemmOperand result;
  result.plain = received.plain;
  result.rows = received.packed;
  return result;
}

void TwoLevelDispatcher::do_dispatch(const Context& op, const GemmOperand& y_tD, const DispatchSaved& saved,
                                     const GemmOperand& x_RD) {
  const DispatchSaved& within = *two_level_routing(saved).within;
  if (!op.measuring()) plan(op, saved);
  {
    const ArenaScope scope(*op.arena);
    to_domains(op, saved.routing.weights_tK, within.routing.weights_tK, saved, "weights").wait();
  }
  within_->dispatch(op, exchange_tokens(op, y_tD, options().dispatch_forward, saved, "dispatch"), within, x_RD);
}

void TwoLevelDispatcher::do_dispatch_again(const Context& op, const GemmOperand& y_tD, const DispatchSaved& saved,
                                           const GemmOperand& x_RD) {
  const GemmOperand tokens = exchange_tokens(op, y_tD, options().dispatch_forward, saved, "dispatch again");
  within_->dispatch_again(op, tokens, *two_level_routing(saved).within, x_RD);
}

void TwoLevelDispatcher::do_combine_backward(const Context& op, const GemmOperand& d_y_tD, const DispatchSaved& saved,
                                             const GemmOperand& d_out_RD) {
  const GemmOperand tokens = exchange_tokens(op, d_y_tD, options().combine_backward, saved, "combine backward");
  within_->combine_backward(op, tokens, *two_level_routing(saved).within, d_out_RD);
}

void TwoLevelDispatcher::return_sums(const Context& op, const Tensor& x, const DispatchSaved& saved, const Tensor& y_tD,
                                     Write write, std::string_view operation) {
  const std::int64_t num_tokens = num_tokens_within(saved);
  // The last row stands for domains to which a token was not sent.
  const Tensor back = op.arena->allocate({num_tokens + 1, options().dim}, options().dtype);
  if (!op.measuring()) {
    from_domains(x, back, saved, operation).wait();
    set_zero(op, back.rows(num_tokens, num_tokens + 1));
  }
  combine_rows(op, back, two_level_routing(saved).sent_of_token_tN, {}, y_tD, write);
}

void TwoLevelDispatcher::do_combine(const Context& op, const Tensor& out_RD, const DispatchSaved& saved,
                                    const Tensor& y_tD, Write write) {
  const Tensor sums = op.arena->allocate({num_tokens_within(saved), options().dim}, options().dtype);
  within_->combine(op, out_RD, *two_level_routing(saved).within, sums, Write::kAssign);
  return_sums(op, sums, saved, y_tD, write, "combine");
}

void TwoLevelDispatcher::do_dispatch_backward(const Context& op, const Tensor& d_x_RD, const Tensor& d_weights_R,
                                              const DispatchSaved& saved, const Tensor& d_y_tD, Write write,
                                              const Tensor& d_weights_tK) {
  const TwoLevelRouting& routing = two_level_routing(saved);
  const std::int64_t num_tokens = num_tokens_within(saved);
  const Tensor sums = op.arena->allocate({num_tokens, options().dim}, options().dtype);
  const Tensor d_weights = op.arena->allocate({num_tokens, options().top_k}, DType::kFloat32);
  within_->dispatch_backward(op, d_x_RD, d_weights_R, *routing.within, sums, Write::kAssign, d_weights);
  {
    const ArenaScope scope(*op.arena);
    const Tensor back = op.arena->allocate(d_weights.shape(), DType::kFloat32);
    if (!op.measuring()) from_domains(d_weights, back, saved, "weights' gradients").wait();
    gather_numbers(op, back, routing.number_of_slot_tK, d_weights_tK);
  }
  return_sums(op, sums, saved, d_y_tD, write, "dispatch backward");
}

Tensor TwoLevelDispatcher::rows_in_window(const Context& op, const DispatchSaved& saved) const {
  return within_->rows_in_window(op, *two_level_routing(saved).within);
}

Tensor TwoLevelDispatcher::gradients_in_window(const Context& op, const DispatchSaved& saved) const {
  return within_->gradients_in_window(op, *two_level_routing(saved).within);
}

}  // namespace tessera::ep
