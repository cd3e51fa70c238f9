#include "ep/dispatcher.h"

#include <array>
#include <cmath>
#include <limits>
#include <numeric>

#include "ep/as_call.h"
#include "ep/domain_exchange.h"
#include "ep/host_numbers.h"
#include "ep/rows.h"
#include "ops/elementwise/elementwise.h"
#include "ops/kit/checks.h"
#include "ops/kit/gemm_operand.h"
#include "ops/routing/permute.h"
#include "ops/runtime/backends.h"

namespace tessera {

Dispatcher::Dispatcher(const DispatchOptions& options, int num_ranks) : options_(options), num_ranks_(num_ranks) {
  TESSERA_CHECK(options.num_experts % num_ranks == 0, "{} experts on {} ranks", options.num_experts, num_ranks);
  TESSERA_CHECK(options.capacity_factor == 0.0 || options.capacity_factor >= 1.0, "{}", options.capacity_factor);
  TESSERA_CHECK(options.max_tokens > 0 && options.dim > 0 && 0 < options.top_k &&
                    options.top_k <= options.num_experts * options.num_domains && options.max_alignment > 0,
                "{} tokens of {} numbers, top {} of {} in each of {} domains, alignment {}", options.max_tokens,
                options.dim, options.top_k, options.num_experts, options.num_domains, options.max_alignment);
  const std::int64_t most = max_rows(options.max_tokens, options.max_alignment);
  require(most <= std::numeric_limits<std::int32_t>::max(),
          "room for any load of {} tokens per rank on {} ranks is {} rows, 2^31 or more: set "
          "parallelism.expert_parallel_capacity_factor, now {}, or make the micro-batch smaller "
          "(training.local_batch_size; with a pipeline, parallelism.pipeline_parallel_microbatch_size)",
          options.max_tokens, num_ranks, most, options.capacity_factor);
}

Dispatcher::~Dispatcher() = default;

std::size_t Dispatcher::window_bytes() const {
  return do_window_bytes() + (exchange_ == nullptr ? 0 : exchange_->window_bytes());
}

void Dispatcher::allocate() {
  do_allocate();
  if (exchange_ != nullptr) exchange_->allocate();
}

void Dispatcher::set_turns(Turns* turns) {
  turns_ = turns;
  if (exchange_ != nullptr) exchange_->set_turns(turns);
}

void Dispatcher::set_exchange(std::unique_ptr<DomainExchange> exchange) { exchange_ = std::move(exchange); }

std::int64_t Dispatcher::max_rows(std::int64_t num_tokens, std::int64_t alignment) const {
  const std::int64_t any_load = num_ranks_ * num_tokens * std::min(options_.top_k, num_local_experts());
  const double balanced = balanced_rows(num_tokens);
  const auto limit = static_cast<std::int64_t>(std::ceil(options_.capacity_factor * balanced));
  const std::int64_t rows = options_.capacity_factor > 0.0 ? std::min(any_load, limit) : any_load;
  return tessera::max_rows(rows, num_local_experts(), alignment);
}

double Dispatcher::expected_rows(std::int64_t num_tokens, std::int64_t alignment) const {
  const double padding = 0.5 * static_cast<double>(num_local_experts() * (alignment - 1));
  return std::min(balanced_rows(num_tokens) + padding, static_cast<double>(max_rows(num_tokens, alignment)));
}

DispatchSaved Dispatcher::allocate_saved(const Context& op, const DispatchLayer& layer,
                                         const TokenRouting& routing) const {
  if (exchange_ == nullptr) return allocate_round(op, {.layer = layer, .routing = routing});
  auto exchange = std::make_shared<const DomainExchangeSaved>(exchange_->allocate_saved(op, routing));
  return allocate_round(op, {.layer = layer, .routing = exchange->within, .exchange = exchange});
}

DispatchSaved Dispatcher::allocate_round(const Context& op, DispatchSaved saved) const {
  const DispatchLayer& layer = saved.layer;
  const TokenRouting& routing = saved.routing;
  const std::int64_t num_tokens = routing.expert_ids_tK.dim(0);
  TESSERA_CHECK(0 < num_tokens && num_tokens <= options_.max_tokens && 0 < layer.alignment &&
                    layer.alignment <= options_.max_alignment,
                "{}: {} tokens, alignment {}", layer.name, num_tokens, layer.alignment);
  TESSERA_CHECK_TENSOR(routing.expert_ids_tK, DType::kInt32, {num_tokens, options_.top_k});
  TESSERA_CHECK_TENSOR(routing.weights_tK, DType::kFloat32, {num_tokens, options_.top_k});
  TESSERA_CHECK_TENSOR(routing.counts_E, DType::kInt32, {options_.num_experts});
  TESSERA_CHECK(saved.round == 0 || has_rounds(), "{}: round {}", layer.name, saved.round);
  saved.num_rounds = std::make_shared<std::int64_t>(1);
  saved.offsets_e1 = op.arena->allocate({num_local_experts() + 1}, DType::kInt32);
  saved.weights_R = op.arena->allocate({max_rows(saved.num_tokens(), saved.layer.alignment)}, DType::kFloat32);
  allocate_backend(op, saved);
  return saved;
}

void Dispatcher::check_tokens(const Tensor& y_tD, const DispatchSaved& saved) const {
  TESSERA_CHECK_TENSOR(y_tD, options_.dtype, {saved.num_tokens(), options_.dim});
}

void Dispatcher::check_payload(const GemmOperand& y_tD, PayloadPrecision precision, const DispatchSaved& saved) const {
  check_operand(y_tD, saved.num_tokens(), options_.dim, options_.dtype);
  TESSERA_CHECK(y_tD.plain.defined() ||
                (precision == PayloadPrecision::kMxfp8 && y_tD.rows.defined() && y_tD.rows.format == mx::Format{}));
}

void Dispatcher::check_rows(const GemmOperand& x_RD, const DispatchSaved& saved) const {
  check_operand(x_RD, saved.num_rows(), options_.dim, options_.dtype);
}

void Dispatcher::note(const Context& op, const char* call, PayloadPrecision precision,
                      const DispatchSaved& saved) const {
  if (saved.exchange == nullptr) ep::record_call(op, call, options_, num_ranks_, precision, saved.routing, saved.layer);
}

std::int64_t Dispatcher::found_rounds(const Context& /*op*/, const DispatchSaved& first) const {
  return *first.num_rounds;
}

std::int64_t Dispatcher::num_rounds(const Context& op, const DispatchSaved& first) const {
  if (!has_rounds()) return 1;
  return op.measuring() ? 2 : found_rounds(op, first);
}

void Dispatcher::repeat(const Context& op, const DispatchSaved& first, std::int64_t least,
                        const std::function<void(std::int64_t)>& run) const {
  const std::int64_t end = std::max(num_rounds(op, first), least);
  for (std::int64_t round = 1; round < end; ++round) run(round);
}

void Dispatcher::for_later_rounds(const Context& op, const DispatchSaved& first, std::int64_t least,
                                  const std::function<void(const Context&, const DispatchSaved&)>& body) const {
  if (!has_rounds()) return;
  TESSERA_CHECK(turns_ == nullptr || turns_->in_call(), "{}", first.layer.name);
  CallStream stream = call_stream(op);
  const Context& call = stream.begin();
  repeat(call, first, least, [&](std::int64_t round) {
    const ArenaScope scope(*op.arena);
    body(call, allocate_later(call, first, round));
  });
  stream.join();
}

template <typename Body>
void Dispatcher::as_call(const Context& op, const DispatchSaved& saved, Body&& body) {
  ep::as_call(turns_, op, has_peers(), [&](const Context& call) {
    body(call);
    give_way(saved);
  });
}

void Dispatcher::add_later_rounds(const Context& op, const DispatchSaved& first, const Tensor& sum_1) const {
  const std::int64_t later = num_rounds(op, first) - 1;
  if (later == 0) return;
  const ArenaScope scope(*op.arena);
  const Tensor later_1 = op.arena->allocate({1}, DType::kInt32);
  if (!op.measuring()) ep::put(op, std::array{static_cast<std::int32_t>(later)}, later_1);
  add_counts(op, later_1, sum_1);
}

void Dispatcher::dispatch(const Context& op, const GemmOperand& y_tD, const DispatchSaved& saved,
                          const GemmOperand& x_RD) {
  const TraceScope trace(op.trace, "ep.dispatch");
  check_payload(y_tD, options_.dispatch_forward, saved);
  check_rows(x_RD, saved);
  // Counts on a GPU are not checked, because that would wait for the GPU.
  if (!op.measuring() && op.target() == Device::kCpu) {
    const auto* counts = saved.routing.counts_E.data<std::int32_t>();
    const std::int64_t counted = std::accumulate(counts, counts + options_.num_experts, std::int64_t{0});
    const std::int64_t num_choices = saved.num_tokens() * options_.top_k;
    TESSERA_CHECK(counted == num_choices || (options_.num_domains > 1 && counted < num_choices),
                  "{}: {} rows counted for {} tokens, top {}", saved.layer.name, counted, saved.num_tokens(),
                  options_.top_k);
  }
  note(op, "dispatch", options_.dispatch_forward, saved);
  as_call(op, saved, [&](const Context& of_call) { do_dispatch(of_call, y_tD, saved, x_RD); });
}

void Dispatcher::dispatch_again(const Context& op, const GemmOperand& y_tD, const DispatchSaved& saved,
                                const GemmOperand& x_RD) {
  const TraceScope trace(op.trace, "ep.dispatch_again");
  check_payload(y_tD, options_.dispatch_forward, saved);
  check_rows(x_RD, saved);
  note(op, "dispatch_again", options_.dispatch_forward, saved);
  as_call(op, saved, [&](const Context& of_call) { do_dispatch_again(of_call, y_tD, saved, x_RD); });
}

void Dispatcher::combine(const Context& op, const Tensor& out_RD, const DispatchSaved& saved, const Tensor& y_tD,
                         Write write) {
  const TraceScope trace(op.trace, "ep.combine");
  check_tokens(y_tD, saved);
  check_rows(out_RD, saved);
  note(op, "combine", PayloadPrecision::kDefault, saved);
  as_call(op, saved, [&](const Context& of_call) { do_combine(of_call, out_RD, saved, y_tD, write); });
}

void Dispatcher::combine_backward(const Context& op, const GemmOperand& d_y_tD, const DispatchSaved& saved,
                                  const GemmOperand& d_out_RD) {
  const TraceScope trace(op.trace, "ep.combine_backward");
  check_payload(d_y_tD, options_.combine_backward, saved);
  check_rows(d_out_RD, saved);
  note(op, "combine_backward", options_.combine_backward, saved);
  as_call(op, saved, [&](const Context& of_call) { do_combine_backward(of_call, d_y_tD, saved, d_out_RD); });
}

void Dispatcher::dispatch_backward(const Context& op, const Tensor& d_x_RD, const Tensor& d_weights_R,
                                   const DispatchSaved& saved, const Tensor& d_y_tD, Write write,
                                   const Tensor& d_weights_tK) {
  const TraceScope trace(op.trace, "ep.dispatch_backward");
  check_tokens(d_y_tD, saved);
  check_rows(d_x_RD, saved);
  TESSERA_CHECK_TENSOR(d_weights_R, DType::kFloat32, {saved.num_rows()});
  TESSERA_CHECK_TENSOR(d_weights_tK, DType::kFloat32, {saved.num_tokens(), options_.top_k});
  note(op, "dispatch_backward", PayloadPrecision::kDefault, saved);
  as_call(op, saved, [&](const Context& of_call) {
    do_dispatch_backward(of_call, d_x_RD, d_weights_R, saved, d_y_tD, write, d_weights_tK);
  });
}

}  // namespace tessera
