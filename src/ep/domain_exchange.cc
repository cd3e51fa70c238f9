#include "ep/domain_exchange.h"

#include <numeric>

#include "ep/as_call.h"
#include "ep/domain_plan.h"
#include "ep/rows.h"
#include "ops/elementwise/elementwise.h"
#include "ops/kit/checks.h"
#include "ops/routing/permute.h"

namespace tessera {

DispatchOptions DomainExchange::options_within() const {
  DispatchOptions options = options_;
  options.num_domains = num_domains();
  options.max_tokens *= num_domains();
  options.num_experts /= num_domains();
  return options;
}

DomainExchangeSaved DomainExchange::allocate_saved(const Context& op, const TokenRouting& chosen) const {
  const auto ints = [&](const Shape& shape) { return op.arena->allocate(shape, DType::kInt32); };
  const std::int64_t tokens = chosen.expert_ids_tK.dim(0), top_k = options_.top_k, domains = num_domains();
  TESSERA_CHECK_TENSOR(chosen.counts_E, DType::kInt32, {options_.num_experts});
  const std::int64_t tokens_within = domains * tokens;
  return {.chosen = chosen,
          .within = {.expert_ids_tK = ints({tokens_within, top_k}),
                     .weights_tK = op.arena->allocate({tokens_within, top_k}, DType::kFloat32),
                     .counts_E = ints({options_.num_experts / domains})},
          .entry_of_sent_M = ints({tokens_within}),
          .sent_of_token_tN = ints({tokens, domains}),
          .number_of_slot_tK = ints({tokens, top_k}),
          .counts = std::make_shared<DomainExchangeSaved::Counts>()};
}

GemmOperand DomainExchange::allocate_tokens(const Context& op, const DispatchSaved& saved,
                                            PayloadPrecision precision) const {
  const ep::Payload payload =
      ep::allocate_payload(saved.num_tokens(), options_.dim, options_.dtype, precision,
                           [&](const Shape& shape, DType dtype) { return op.arena->allocate(shape, dtype); });
  GemmOperand result = payload.plain;
  result.rows = payload.packed;
  return result;
}

Tensor DomainExchange::plan(const Context& op, const DispatchSaved& saved) {
  const DomainExchangeSaved& crossing = *saved.exchange;
  const Tensor& expert_ids_tK = crossing.chosen.expert_ids_tK;
  const auto ints = [&](const Shape& shape) { return op.arena->allocate(shape, DType::kInt32); };
  const std::int64_t domains = num_domains(), in_domain = options_.num_experts / domains;
  const Tensor for_host = ints({2 * domains});
  const Tensor num_sent_N = for_host.rows(0, domains), num_received_N = for_host.rows(domains, 2 * domains);
  const Tensor domain_tN = ints(crossing.sent_of_token_tN.shape()), sent_offsets_N1 = ints({domains + 1});
  if (sends_all()) {
    take_all_domains(op, domain_tN, num_sent_N);
    const std::vector<std::int64_t> all(static_cast<std::size_t>(domains), expert_ids_tK.dim(0));
    *crossing.counts = {.num_sent_N = all, .num_received_N = all};
  } else {
    find_domains(op, expert_ids_tK, in_domain, domain_tN, num_sent_N);
    if (!op.measuring()) {
      across_.all_to_all(num_sent_N, num_received_N, fmt::format("counts of {}", saved.layer.name)).wait();
      for_host_.start(op, for_host);
    }
  }
  sort_by_expert(op, domain_tN, num_sent_N, 1, sent_offsets_N1, crossing.entry_of_sent_M, crossing.sent_of_token_tN);
  place_choices(op, expert_ids_tK, in_domain, crossing.sent_of_token_tN, crossing.number_of_slot_tK);
  if (!sends_all() && !op.measuring()) read_counts(op, crossing);
  return sends_all() ? num_sent_N : num_received_N;
}

void DomainExchange::read_counts(const Context& op, const DomainExchangeSaved& crossing) {
  const std::span<const std::int32_t> numbers = for_host_.wait(op);
  const auto domains = static_cast<std::size_t>(num_domains());
  const auto num_sent = numbers.first(domains), num_received = numbers.subspan(domains, domains);
  *crossing.counts = {.num_sent_N = {num_sent.begin(), num_sent.end()},
                      .num_received_N = {num_received.begin(), num_received.end()}};
}

Work DomainExchange::to_domains(const Context& op, const Tensor& x, const Tensor& received, const DispatchSaved& saved,
                                std::string_view operation) {
  const DomainExchangeSaved& crossing = *saved.exchange;
  const Tensor sent = op.arena->allocate(received.shape(), received.dtype());
  if (op.measuring()) return {};
  const auto& [num_sent_N, num_received_N] = *crossing.counts;
  const std::int64_t num_sent = std::accumulate(num_sent_N.begin(), num_sent_N.end(), std::int64_t{0});
  gather_row_bytes(op, x, crossing.entry_of_sent_M.rows(0, num_sent), num_domains(), sent.rows(0, num_sent));
  return across_.all_to_all_v(sent, num_sent_N, received, num_received_N,
                              fmt::format("{} of {}", operation, saved.layer.name));
}

Work DomainExchange::from_domains(const Tensor& x, const Tensor& back, const DispatchSaved& saved,
                                  std::string_view operation) {
  const auto& [num_sent_N, num_received_N] = *saved.exchange->counts;
  return across_.all_to_all_v(x, num_received_N, back, num_sent_N,
                              fmt::format("{} of {}", operation, saved.layer.name));
}

std::array<Work, 2> DomainExchange::start_tokens(const Context& op, const GemmOperand& y_tD, PayloadPrecision precision,
                                                 const DispatchSaved& saved, const GemmOperand& y_MD,
                                                 std::string_view operation) {
  const auto parts = ep::make_payload(op, y_tD, precision).parts();
  const auto received = ep::Payload{.plain = y_MD.plain, .packed = y_MD.rows}.parts();
  std::array<Work, 2> work;
  for (std::size_t i = 0; i < work.size(); ++i) {
    if (parts[i].defined()) work[i] = to_domains(op, parts[i], received[i], saved, operation);
  }
  return work;
}

void DomainExchange::dispatch(const Context& op, const GemmOperand& y_tD, const DispatchSaved& saved,
                              const GemmOperand& y_MD) {
  const TraceScope trace(op.trace, "ep.dispatch between domains");
  const DomainExchangeSaved& crossing = *saved.exchange;
  const std::int64_t first_expert = across_.rank() * options_.num_experts / num_domains();
  ep::record_call(op, "dispatch", options_, num_ranks_, options_.dispatch_forward, crossing.chosen, saved.layer);
  ep::as_call(turns_, op, /*forks=*/true, [&](const Context& of_call) {
    const Tensor num_received_N = plan(of_call, saved);
    Work ids = to_domains(of_call, crossing.chosen.expert_ids_tK, crossing.within.expert_ids_tK, saved, "expert ids");
    Work weights = to_domains(of_call, crossing.chosen.weights_tK, crossing.within.weights_tK, saved, "weights");
    std::array<Work, 2> tokens = start_tokens(of_call, y_tD, options_.dispatch_forward, saved, y_MD, "dispatch");
    give_way();
    for (Work& part : tokens) part.wait();
    ids.wait();
    weights.wait();
    localize_experts(of_call, first_expert, num_received_N, crossing.within.expert_ids_tK, crossing.within.counts_E);
  });
}

void DomainExchange::send_tokens(const Context& op, const GemmOperand& y_tD, PayloadPrecision precision,
                                 const DispatchSaved& saved, const GemmOperand& y_MD, const char* call,
                                 std::string_view operation) {
  ep::record_call(op, call, options_, num_ranks_, precision, saved.exchange->chosen, saved.layer);
  ep::as_call(turns_, op, /*forks=*/true, [&](const Context& of_call) {
    std::array<Work, 2> tokens = start_tokens(of_call, y_tD, precision, saved, y_MD, operation);
    give_way();
    for (Work& part : tokens) part.wait();
  });
}

void DomainExchange::dispatch_again(const Context& op, const GemmOperand& y_tD, const DispatchSaved& saved,
                                    const GemmOperand& y_MD) {
  const TraceScope trace(op.trace, "ep.dispatch_again between domains");
  send_tokens(op, y_tD, options_.dispatch_forward, saved, y_MD, "dispatch_again", "dispatch again");
}

void DomainExchange::combine_backward(const Context& op, const GemmOperand& d_y_tD, const DispatchSaved& saved,
                                      const GemmOperand& d_y_MD) {
  const TraceScope trace(op.trace, "ep.combine_backward between domains");
  send_tokens(op, d_y_tD, options_.combine_backward, saved, d_y_MD, "combine_backward", "combine backward");
}

void DomainExchange::return_sums(const Context& op, const Tensor& x_MD, const DispatchSaved& saved, const Tensor& y_tD,
                                 Write write, std::string_view operation) {
  // The last row stands for domains to which a token was not sent.
  const Tensor back = op.arena->allocate({saved.num_tokens() + 1, options_.dim}, options_.dtype);
  if (!op.measuring()) {
    Work work = from_domains(x_MD, back, saved, operation);
    give_way();
    work.wait();
    set_zero(op, back.rows(saved.num_tokens(), saved.num_tokens() + 1));
  }
  combine_rows(op, back, saved.exchange->sent_of_token_tN, {}, y_tD, write);
}

void DomainExchange::combine(const Context& op, const Tensor& y_MD, const DispatchSaved& saved, const Tensor& y_tD,
                             Write write) {
  const TraceScope trace(op.trace, "ep.combine between domains");
  ep::record_call(op, "combine", options_, num_ranks_, PayloadPrecision::kDefault, saved.exchange->chosen, saved.layer);
  ep::as_call(turns_, op, /*forks=*/true,
              [&](const Context& of_call) { return_sums(of_call, y_MD, saved, y_tD, write, "combine"); });
}

void DomainExchange::dispatch_backward(const Context& op, const Tensor& d_y_MD, const Tensor& d_weights_MK,
                                       const DispatchSaved& saved, const Tensor& d_y_tD, Write write,
                                       const Tensor& d_weights_tK) {
  const TraceScope trace(op.trace, "ep.dispatch_backward between domains");
  ep::record_call(op, "dispatch_backward", options_, num_ranks_, PayloadPrecision::kDefault, saved.exchange->chosen,
                  saved.layer);
  ep::as_call(turns_, op, /*forks=*/true, [&](const Context& of_call) {
    const Tensor back = op.arena->allocate(d_weights_MK.shape(), DType::kFloat32);
    Work numbers;
    if (!op.measuring()) numbers = from_domains(d_weights_MK, back, saved, "weights' gradients");
    return_sums(of_call, d_y_MD, saved, d_y_tD, write, "dispatch backward");
    numbers.wait();
    gather_numbers(of_call, back, saved.exchange->number_of_slot_tK, d_weights_tK);
  });
}

}  // namespace tessera
