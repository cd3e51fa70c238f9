#include "ep/backends/two_level_dispatcher.h"

#include <array>
#include <numeric>

#include "ep/backends/make_dispatcher.h"
#include "ep/domain_plan.h"
#include "ep/exchange_plan.h"
#include "ops/elementwise/elementwise.h"
#include "ops/routing/permute.h"

namespace tessera::ep {
namespace {

/// All tensors are int32. There are N domains. Up to N·t tokens cross between domains each way. A token crosses once
/// per domain.
struct TwoLevelRouting {
  /// This rank's tokens in the order in which they are sent, domain by domain. An entry is token · N + domain.
  Tensor entry_of_sent_Nt;
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
  routing.entry_of_sent_Nt = ints({num_tokens_within(saved)});
  routing.sent_of_token_tN = ints({saved.num_tokens(), num_domains()});
  routing.number_of_slot_tK = ints({saved.num_tokens(), options().top_k});
  routing.counts = std::make_shared<TwoLevelRouting::Counts>();
}

TwoLevelDispatcher::SentIds TwoLevelDispatcher::plan(const Context& op, const DispatchSaved& saved) {
  const TwoLevelRouting& routing = two_level_routing(saved);
  const TokenRouting &chosen = saved.routing, &within = routing.within->routing;
  const auto ints = [&](const Shape& shape) { return op.arena->allocate(shape, DType::kInt32); };
  const std::int64_t domains = num_domains(), in_domain = options().num_experts / domains;
  const std::string name = fmt::format("counts of {}", saved.layer.name);
  // The number of rounds, and of tokens to each domain and from each domain.
  const Tensor for_host = ints({1 + 2 * domains});
  const Tensor num_sent_N = for_host.rows(1, 1 + domains), num_received_N = for_host.rows(1 + domains, 1 + 2 * domains);
  const Tensor round_ids_tK = has_rounds() ? round_ids(op, saved, for_host.rows(0, 1), name) : chosen.expert_ids_tK;
  const Tensor domain_tN = ints(routing.sent_of_token_tN.shape()), sent_offsets_N1 = ints({domains + 1});
  if (sends_all()) {
    take_all_domains(op, domain_tN, num_sent_N);
    const std::vector<std::int64_t> all(static_cast<std::size_t>(domains), saved.num_tokens());
    *routing.counts = {.num_sent_N = all, .num_received_N = all};
  } else {
    find_domains(op, round_ids_tK, in_domain, domain_tN, num_sent_N);
    if (!op.measuring()) {
      groups_.across.all_to_all(num_sent_N, num_received_N, name).wait();
      for_host_.start(op, for_host);
    }
  }
  sort_by_expert(op, domain_tN, num_sent_N, 1, sent_offsets_N1, routing.entry_of_sent_Nt, routing.sent_of_token_tN);
  place_choices(op, round_ids_tK, in_domain, routing.sent_of_token_tN, routing.number_of_slot_tK);
  if (!sends_all() && !op.measuring()) read_counts(op, saved);
  return {.work = to_domains(op, round_ids_tK, within.expert_ids_tK, saved, "expert ids"),
          .num_received_N = sends_all() ? num_sent_N : num_received_N};
}

Tensor TwoLevelDispatcher::round_ids(const Context& op, const DispatchSaved& saved, const Tensor& num_rounds_1,
                                     const std::string& name) {
  const auto ints = [&](const Shape& shape) { return op.arena->allocate(shape, DType::kInt32); };
  const TokenRouting& chosen = saved.routing;
  const std::int64_t num_experts = options().num_experts;
  const Tensor counts_LE = gather_on_device(op, groups_.within, chosen.counts_E, name);
  const Tensor counts_PE = gather_on_device(op, groups_.across, counts_LE, name).reshape({num_ranks(), num_experts});
  const Tensor first_row_PE = ints(counts_PE.shape()), kept_E = ints({num_experts});
  place_round(op, counts_PE, saved.layer.alignment, saved.round, saved.num_rows(), first_row_PE, num_rounds_1);
  const Tensor round_ids_tK = ints(chosen.expert_ids_tK.shape());
  keep_round(op, chosen.expert_ids_tK, chosen.counts_E, first_row_PE[groups_.all.rank()], saved.num_rows(),
             round_ids_tK, kept_E);
  return round_ids_tK;
}

void TwoLevelDispatcher::read_counts(const Context& op, const DispatchSaved& saved) {
  const std::span<const std::int32_t> numbers = for_host_.wait(op);
  const auto domains = static_cast<std::size_t>(num_domains());
  const auto num_sent = numbers.subspan(1, domains), num_received = numbers.subspan(1 + domains, domains);
  if (has_rounds()) *saved.num_rounds = numbers[0];
  *two_level_routing(saved).counts = {.num_sent_N = {num_sent.begin(), num_sent.end()},
                                      .num_received_N = {num_received.begin(), num_received.end()}};
}

Work TwoLevelDispatcher::to_domains(const Context& op, const Tensor& x, const Tensor& received,
                                    const DispatchSaved& saved, std::string_view operation) {
  const TwoLevelRouting& routing = two_level_routing(saved);
  const Tensor sent = op.arena->allocate(received.shape(), received.dtype());
  if (op.measuring()) return {};
  const auto& [num_sent_N, num_received_N] = *routing.counts;
  const std::int64_t num_sent = std::accumulate(num_sent_N.begin(), num_sent_N.end(), std::int64_t{0});
  gather_row_bytes(op, x, routing.entry_of_sent_Nt.rows(0, num_sent), num_domains(), sent.rows(0, num_sent));
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
  give_way(saved);
  for (Work& part : work) part.wait();
  GemmOperand result;
  result.plain = received.plain;
  result.rows = received.packed;
  return result;
}

void TwoLevelDispatcher::do_dispatch(const Context& op, const GemmOperand& y_tD, const DispatchSaved& saved,
                                     const GemmOperand& x_RD) {
  const DispatchSaved& within = *two_level_routing(saved).within;
  SentIds ids = plan(op, saved);
  Work weights = to_domains(op, saved.routing.weights_tK, within.routing.weights_tK, saved, "weights");
  const GemmOperand tokens = exchange_tokens(op, y_tD, options().dispatch_forward, saved, "dispatch");
  ids.work.wait();
  weights.wait();
  localize_experts(op, groups_.across.rank() * options().num_experts / num_domains(), ids.num_received_N,
                   within.routing.expert_ids_tK, within.routing.counts_E);
  within_->dispatch(op, tokens, within, x_RD);
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
    Work work = from_domains(x, back, saved, operation);
    give_way(saved);
    work.wait();
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
  const Tensor back = op.arena->allocate(d_weights.shape(), DType::kFloat32);
  Work numbers;
  if (!op.measuring()) numbers = from_domains(d_weights, back, saved, "weights' gradients");
  return_sums(op, sums, saved, d_y_tD, write, "dispatch backward");
  numbers.wait();
  gather_numbers(op, back, routing.number_of_slot_tK, d_weights_tK);
}

Tensor TwoLevelDispatcher::do_rows_in_window(const Context& op, const DispatchSaved& saved) const {
  return within_->rows_in_window(op, *two_level_routing(saved).within);
}

Tensor TwoLevelDispatcher::do_gradients_in_window(const Context& op, const DispatchSaved& saved) const {
  return within_->gradients_in_window(op, *two_level_routing(saved).within);
}

}  // namespace tessera::ep
