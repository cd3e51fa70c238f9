#include "ep/backends/standard_dispatcher.h"

#include <array>
#include <numeric>

#include "ep/host_plan.h"
#include "ep/placement.h"
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

void StandardDispatcher::sort_slots(const Context& op, const DispatchSaved& saved,
                                    std::span<const std::int32_t> first_row_E) {
  const auto& routing = saved.backend_as<StandardRouting>();
  const Tensor sent_offsets_E1 = op.arena->allocate({options().num_experts + 1}, DType::kInt32);
  Tensor ids_tK = saved.routing.expert_ids_tK, counts_E = saved.routing.counts_E;
  if (is_cut(op, saved)) {
    const Tensor round_ids_tK = op.arena->allocate(ids_tK.shape(), DType::kInt32);
    const Tensor round_counts_E = op.arena->allocate(counts_E.shape(), DType::kInt32);
    if (!op.measuring()) {
      Ints ids = fetch(op, ids_tK);
      const Ints counts = keep_round(first_row_E, saved.num_rows(), ids);
      put(op, ids, round_ids_tK);
      put(op, counts, round_counts_E);
    }
    ids_tK = round_ids_tK;
    counts_E = round_counts_E;
  }
  sort_by_expert(op, ids_tK, counts_E, 1, sent_offsets_E1, routing.slot_of_sent_tK, routing.sent_of_slot_tK);
}

void StandardDispatcher::plan(const Context& op, const DispatchSaved& saved) {
  const auto& routing = saved.backend_as<StandardRouting>();
  const std::int64_t num_experts = options().num_experts, local = num_local_experts(), ranks = num_ranks();
  if (op.measuring()) return sort_slots(op, saved, {});
  const auto [counts, first_rows, offsets] = gather_placement(op, group_, saved);
  const auto rows_of = [&, &first_row = first_rows, &count = counts](std::int64_t source, std::int64_t expert) {
    const auto at = static_cast<std::size_t>(source * num_experts + expert);
    return rows_in_round(first_row[at], count[at], saved.num_rows());
  };
  sort_slots(
      op, saved,
      std::span(first_rows)
          .subspan(static_cast<std::size_t>(group_.rank() * num_experts), static_cast<std::size_t>(num_experts)));

  const std::int64_t first_expert = group_.rank() * local;
  Ints source_of_row(static_cast<std::size_t>(saved.num_rows()), -1), row_of_received;
  StandardRouting::Counts& rows = *routing.counts;
  rows = {};
  for (std::int64_t source = 0; source < ranks; ++source) {
    const std::size_t before = row_of_received.size();
    for (std::int64_t x = first_expert; x < first_expert + local; ++x) {
      const RowRange theirs = rows_of(source, x);
      for (std::int32_t row = theirs.begin; row < theirs.end; ++row) {
        source_of_row[static_cast<std::size_t>(row)] = static_cast<std::int32_t>(row_of_received.size());
        row_of_received.push_back(row);
      }
    }
    rows.num_received_P.push_back(static_cast<std::int64_t>(row_of_received.size() - before));
    rows.num_sent_P.push_back(0);
    for (std::int64_t x = source * local; x < (source + 1) * local; ++x) {
      rows.num_sent_P.back() += rows_of(group_.rank(), x).size();
    }
  }
  put(op, source_of_row, routing.source_of_row_R);
  put(op, row_of_received, routing.row_of_received_R);
  put(op,
      std::span(offsets).subspan(static_cast<std::size_t>(group_.rank() * (local + 1)),
                                 static_cast<std::size_t>(local + 1)),
      saved.offsets_e1);
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
  const auto allocate = [&](const Shape& shape, DType dtype) { return op.arena->allocate(shape, dtype); };
  const auto allocate_rows = [&](std::int64_t count) {
    return allocate_payload(count, options().dim, options().dtype, precision, allocate);
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
  {
    const ArenaScope scope(*op.arena);
    const Tensor sent = op.arena->allocate(routing.slot_of_sent_tK.shape(), DType::kFloat32);
    const Tensor received = op.arena->allocate({saved.num_rows()}, DType::kFloat32);
    gather_numbers(op, saved.routing.weights_tK, routing.slot_of_sent_tK, sent);
    if (!op.measuring()) to_experts(sent, received, saved, "weights").wait();
    gather_numbers(op, received, routing.source_of_row_R, saved.weights_R);
  }
  send_tokens(op, y_tD, options().dispatch_forward, saved, x_RD, "dispatch");
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
    from_experts(returned, back, saved, operation).wait();
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
  {
    const ArenaScope scope(*op.arena);
    const Tensor returned = op.arena->allocate({saved.num_rows()}, DType::kFloat32);
    const Tensor back = op.arena->allocate(routing.slot_of_sent_tK.shape(), DType::kFloat32);
    if (!op.measuring()) {
      const Tensor rows = received_rows(saved);
      gather_numbers(op, d_weights_R, rows, returned.rows(0, rows.dim(0)));
      from_experts(returned, back, saved, "weights' gradients").wait();
    }
    gather_numbers(op, back, routing.sent_of_slot_tK, d_weights_tK);
  }
  return_rows(op, d_x_RD, Tensor(), saved, d_y_tD, write, "dispatch backward");
}

}  // namespace tessera::ep
