#include "ep/domain_exchange.h"

#include <algorithm>

#include "ep/as_call.h"
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

std::size_t DomainExchange::part_bytes() const {
  const std::size_t row = std::max(static_cast<std::size_t>(options_.dim) * size_of(options_.dtype),
                                   static_cast<std::size_t>(options_.top_k) * sizeof(float));
  return static_cast<std::size_t>(options_.max_tokens) * row;
}

std::size_t DomainExchange::window_bytes() const {
  if (options_.device != Device::kCuda || num_domains() == 2) return 0;
  return 2 * static_cast<std::size_t>(num_domains() - 1) * part_bytes();
}

void DomainExchange::allocate() {
  if (window_bytes() == 0) return;
  across_.open_counted(static_cast<std::size_t>(num_domains()) * part_bytes());
  is_open_ = true;
}

DomainExchange::~DomainExchange() {
  if (is_open_) across_.close_counted();
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
          .plan = {.token_of_sent_M = ints({tokens_within}),
                   .sent_of_token_TN = ints({tokens, domains}),
                   .number_of_slot_TK = ints({tokens, top_k}),
                   .num_sent_N = ints({domains})},
          .num_received_N = ints({domains})};
}

GemmOperand DomainExchange::allocate_tokens(const Context& op, const DispatchSaved& saved,
                                            PayloadPrecision precision) const {
  const ep::Payload payload = ep::allocate_payload(op, saved.num_tokens(), options_.dim, options_.dtype, precision);
  GemmOperand result = payload.plain;
  result.rows = payload.packed;
  return result;
}

void DomainExchange::plan(const Context& op, const DispatchSaved& saved) {
  const DomainExchangeSaved& crossing = *saved.exchange;
  plan_crossing(op, crossing.chosen.expert_ids_tK, options_.num_experts / num_domains(), crossing.plan);
  if (op.measuring()) return;
  across_.all_to_all(crossing.plan.num_sent_N, crossing.num_received_N, fmt::format("counts of {}", saved.layer.name))
      .wait();
}

Work DomainExchange::to_domains(const Context& op, const Tensor& x, const Tensor& received, const DispatchSaved& saved,
                                std::string_view operation) {
  const DomainExchangeSaved& crossing = *saved.exchange;
  const Tensor sent = op.arena->allocate(received.shape(), received.dtype());
  if (op.measuring()) return {};
  gather_row_bytes(op, x, crossing.plan.token_of_sent_M, 1, sent);
  return across_.all_to_all_counted(sent, crossing.plan.num_sent_N, received, crossing.num_received_N,
                                    fmt::format("{} of {}", operation, saved.layer.name));
}

Work DomainExchange::from_domains(const Tensor& x, const Tensor& back, const DispatchSaved& saved,
                                  std::string_view operation) {
  const DomainExchangeSaved& crossing = *saved.exchange;
  return across_.all_to_all_counted(x, crossing.num_received_N, back, crossing.plan.num_sent_N,
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
    plan(of_call, saved);
    Work ids = to_domains(of_call, crossing.chosen.expert_ids_tK, crossing.within.expert_ids_tK, saved, "expert ids");
    Work weights = to_domains(of_call, crossing.chosen.weights_tK, crossing.within.weights_tK, saved, "weights");
    std::array<Work, 2> tokens = start_tokens(of_call, y_tD, options_.dispatch_forward, saved, y_MD, "dispatch");
    give_way();
    for (Work& part : tokens) part.wait();
    ids.wait();
    weights.wait();
    localize_experts(of_call, first_expert, crossing.num_received_N, crossing.within.expert_ids_tK,
                     crossing.within.counts_E);
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
    Work work = from_domains(x_MD, back.rows(0, saved.num_tokens()), saved, operation);
    give_way();
    work.wait();
    set_zero(op, back.rows(saved.num_tokens(), saved.num_tokens() + 1));
  }
  combine_rows(op, back, saved.exchange->plan.sent_of_token_TN, {}, y_tD, write);
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
    const Tensor back = of_call.arena->allocate(d_weights_MK.shape(), DType::kFloat32);
    Work numbers;
    if (!of_call.measuring()) numbers = from_domains(d_weights_MK, back, saved, "weights' gradients");
    return_sums(of_call, d_y_MD, saved, d_y_tD, write, "dispatch backward");
    numbers.wait();
    gather_numbers(of_call, back, saved.exchange->plan.number_of_slot_TK, d_weights_tK);
  });
}

}  // namespace tessera
