#include "ep/backends/standard_dispatcher.h"

#include <array>
#include <numeric>

#include "ep/exchange_plan.h"
#include "ops/routing/permute.h"

namespace tessera::ep {
namespace {

/// All tensors are int32. A slot is t·K + k. Sent rows are this rank's slots of the round, sorted by expert. Received
/// rows are ordered by source rank, then expert, then token.
struct StandardRouting {
  Tensor slot_of_sent_tK, sent_of_slot_tK;
  Tensor source_of_row_R, row_of_received_R;
  /// The numbers of rows to each rank and from each rank. They are on the host, which drives the collectives.
  struct Counts {
    std::vector<std::int64_t> num_sent_P, num_received_P;
  };
  std::shared_ptr<Counts> counts;
};

const StandardRouting::Counts& counts_of(const DispatchSaved& saved) {
  return *saved.backend_as<StandardRouting>().counts;
}

/// Returns the rows that this rank has received.
Tensor received_rows(const DispatchSaved& saved) {
  const std::vector<std::int64_t>& counts = counts_of(saved).num_received_P;
  return saved.backend_as<StandardRouting>().row_of_received_R.rows(
      0, std::accumulate(counts.begin(), counts.end(), std::int64_t{0}));
}

}  // namespace

void StandardDispatcher::allocate_backend(const Context& op, DispatchSaved& saved) const {
  const auto ints = [&](const Shape& shape) { return op.arena->allocate(shape, DType::kInt32); };
  const std::int64_t num_slots = saved.num_tokens() * options().top_k, num_rows = saved.num_rows();
  saved.backend = StandardRouting{
      .slot_of_sent_tK = ints({num_slots}),
      .sent_of_slot_tK = ints({saved.num_tokens(), options().top_k}),
      .source_of_row_R = ints({num_rows}),
      .row_of_received_R = ints({num_rows}),
      .counts = std::make_shared<StandardRouting::Counts>(),
  };
}

void StandardDispatcher::plan(const Context& op, const DispatchSaved& saved) {
  const auto& routing = saved.backend_as<StandardRouting>();
  const auto ints = [&](const Shape& shape) { return op.arena->allocate(shape, DType::kInt32); };
  const std::int64_t ranks = num_ranks(), rank = group_.rank(), room = saved.num_rows();
  const Tensor counts_PE =
      gather_on_device(op, group_, saved.routing.counts_E, fmt::format("counts of {}", saved.layer.name));
  const Tensor first_row_PE = ints(counts_PE.shape());
  // The number of rounds, and of rows to each rank and from each rank.
  const Tensor for_host = ints({1 + 2 * ranks});
  place_round(op, counts_PE, saved.layer.alignment, saved.round, room, first_row_PE, for_host.rows(0, 1));
  plan_exchange(op, counts_PE, first_row_PE, rank, saved.layer.alignment, saved.offsets_e1, routing.source_of_row_R,
                routing.row_of_received_R, for_host.rows(1, 1 + ranks), for_host.rows(1 + ranks, 1 + 2 * ranks));
  if (!op.measuring()) for_host_.start(op, for_host);

  const Tensor round_ids_tK = ints(saved.routing.expert_ids_tK.shape());
  const Tensor kept_E = ints({options().num_experts}), sent_offsets_E1 = ints({options().num_experts + 1});
  keep_round(op, saved.routing.expert_ids_tK, saved.routing.counts_E, first_row_PE[rank], room, round_ids_tK, kept_E);
  sort_by_expert(op, round_ids_tK, kept_E, 1, sent_offsets_E1, routing.slot_of_sent_tK, routing.sent_of_slot_tK);
  if (op.measuring()) return;
  // The host waits here. What follows the numbers on the GPU runs meanwhile.
  const std::span<const std::int32_t> numbers = for_host_.wait(op);
  const auto num_sent = numbers.subspan(1, static_cast<std::size_t>(ranks));
  const auto num_received = numbers.subspan(1 + static_cast<std::size_t>(ranks));
  *saved.num_rounds = numbers[0];
  *routing.counts = {.num_sent_P = {num_sent.begin(), num_sent.end()},
                     .num_received_P = {num_received.begin(), num_received.end()}};
}

Work StandardDispatcher::to_experts(const Tensor& sent, const Tensor& received, const DispatchSaved& saved,
                                    std::string_view operation) {
  return exchange(sent, counts_of(saved).num_sent_P, received, counts_of(saved).num_received_P,
                  fmt::format("{} of {}", operation, saved.layer.name));
}

Work StandardDispatcher::from_experts(const Tensor& returned, const Tensor& back, const DispatchSaved& saved,
                                      std::string_view operation) {
  return exchange(returned, counts_of(saved).num_received_P, back, counts_of(saved).num_sent_P,
                  fmt::format("{} of {}", operation, saved.layer.name));
}

void StandardDispatcher::send_tokens(const Context& op, const GemmOperand& y_tD, PayloadPrecision precision,
                                     const DispatchSaved& saved, const GemmOperand& x_RD, std::string_view operation) {
  const auto& routing = saved.backend_as<StandardRouting>();
  const auto allocate_rows = [&](std::int64_t count) {
    return allocate_payload(op, count, options().dim, options().dtype, precision);
  };
  const Payload tokens = make_payload(op, y_tD, precision);
  const Payload sent = allocate_rows(saved.num_tokens() * options().top_k);
  const Payload received = allocate_rows(saved.num_rows());
  std::array<Work, 2> work;
  for (std::size_t i = 0; i < work.size(); ++i) {
    const Tensor part = sent.parts()[i];
    if (!part.defined()) continue;
    gather_row_bytes(op, tokens.parts()[i], routing.slot_of_sent_tK, options().top_k, part);
    if (!op.measuring()) work[i] = to_experts(part, received.parts()[i], saved, operation);
  }
  give_way(saved);
  for (Work& part : work) part.wait();
  deliver_rows(op, received, options().dtype, routing.source_of_row_R, saved.num_rows_1(), x_RD);
}

void StandardDispatcher::do_dispatch(const Context& op, const GemmOperand& y_tD, const DispatchSaved& saved,
                                     const GemmOperand& x_RD) {
  const auto& routing = saved.backend_as<StandardRouting>();
  {
    const ArenaScope scope(*op.arena);
    plan(op, saved);
  }
  const Tensor sent = op.arena->allocate(routing.slot_of_sent_tK.shape(), DType::kFloat32);
  const Tensor received = op.arena->allocate({saved.num_rows()}, DType::kFloat32);
  gather_numbers(op, saved.routing.weights_tK, routing.slot_of_sent_tK, sent);
  Work weights;
  if (!op.measuring()) weights = to_experts(sent, received, saved, "weights");
  send_tokens(op, y_tD, options().dispatch_forward, saved, x_RD, "dispatch");
  weights.wait();
  gather_numbers(op, received, routing.source_of_row_R, saved.weights_R);
}

void StandardDispatcher::do_dispatch_again(const Context& op, const GemmOperand& y_tD, const DispatchSaved& saved,
                                           const GemmOperand& x_RD) {
  send_tokens(op, y_tD, options().dispatch_forward, saved, x_RD, "dispatch again");
}

void StandardDispatcher::do_combine_backward(const Context& op, const GemmOperand& d_y_tD, const DispatchSaved& saved,
                                             const GemmOperand& d_out_RD) {
  send_tokens(op, d_y_tD, options().combine_backward, saved, d_out_RD, "combine backward");
}

void StandardDispatcher::return_rows(const Context& op, const Tensor& x_RD, const Tensor& weights_tK,
                                     const DispatchSaved& saved, const Tensor& y_tD, Write write,
                                     std::string_view operation) {
  const auto& routing = saved.backend_as<StandardRouting>();
  const Tensor returned = op.arena->allocate(x_RD.shape(), x_RD.dtype());
  const Tensor back = op.arena->allocate({saved.num_tokens() * options().top_k, options().dim}, x_RD.dtype());
  if (!op.measuring()) {
    const Tensor rows = received_rows(saved);
    gather_row_bytes(op, x_RD, rows, 1, returned.rows(0, rows.dim(0)));
    Work work = from_experts(returned, back, saved, operation);
    give_way(saved);
    work.wait();
  }
  combine_rows_by_rank(op, back, routing.sent_of_slot_tK, weights_tK, saved.routing.expert_ids_tK, num_local_experts(),
                       y_tD, write);
}

void StandardDispatcher::do_combine(const Context& op, const Tensor& out_RD, const DispatchSaved& saved,
                                    const Tensor& y_tD, Write write) {
  return_rows(op, out_RD, saved.routing.weights_tK, saved, y_tD, write, "combine");
}

void StandardDispatcher::do_dispatch_backward(const Context& op, const Tensor& d_x_RD, const Tensor& d_weights_R,
                                              const DispatchSaved& saved, const Tensor& d_y_tD, Write write,
                                              const Tensor& d_weights_tK) {
  const auto& routing = saved.backend_as<StandardRouting>();
  const Tensor returned = op.arena->allocate({saved.num_rows()}, DType::kFloat32);
  const Tensor back = op.arena->allocate(routing.slot_of_sent_tK.shape(), DType::kFloat32);
  Work d_weights;
  if (!op.measuring()) {
    const Tensor rows = received_rows(saved);
    gather_numbers(op, d_weights_R, rows, returned.rows(0, rows.dim(0)));
    d_weights = from_experts(returned, back, saved, "weights' gradients");
  }
  return_rows(op, d_x_RD, Tensor(), saved, d_y_tD, write, "dispatch backward");
  d_weights.wait();
  gather_numbers(op, back, routing.sent_of_slot_tK, d_weights_tK);
}

}  // namespace tessera::ep
