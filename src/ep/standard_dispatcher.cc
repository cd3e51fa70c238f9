#include "ep/standard_dispatcher.h"

#include <array>
#include <numeric>

#include "ep/placement.h"
#include "ops/cpu/types.h"
#include "ops/permute.h"
#include "tensor/parallel.h"

namespace tessera::ep {
namespace {

std::vector<std::int64_t> host_counts(const Tensor& x_P) {
  return {x_P.data<std::int32_t>(), x_P.data<std::int32_t>() + x_P.dim(0)};
}

/// Rows that this rank has received.
Tensor received_rows(const StandardRouting& routing) {
  const std::vector<std::int64_t> counts = host_counts(routing.num_received_P);
  return routing.row_of_received_R.rows(0, std::accumulate(counts.begin(), counts.end(), std::int64_t{0}));
}

}  // namespace

void StandardDispatcher::allocate_backend(const Context& op, DispatchSaved& saved) const {
  const auto ints = [&](const Shape& shape) { return op.arena->allocate(shape, DType::kInt32); };
  const std::int64_t num_slots = saved.num_tokens() * options().top_k, num_rows = saved.num_rows();
  saved.backend = StandardRouting{
      .slot_of_sent_TK = ints({num_slots}),
      .sent_of_slot_TK = ints({saved.num_tokens(), options().top_k}),
      .num_sent_P = ints({num_ranks()}),
      .num_received_P = ints({num_ranks()}),
      .source_of_row_R = ints({num_rows}),
      .row_of_received_R = ints({num_rows}),
  };
}

void StandardDispatcher::plan(const Context& op, const DispatchSaved& saved) {
  const auto& routing = std::get<StandardRouting>(saved.backend);
  const std::int64_t num_experts = options().num_experts, local = num_local_experts(), ranks = num_ranks();
  const Tensor counts_PE = op.arena->allocate({ranks, num_experts}, DType::kInt32);
  const Tensor sent_offsets_E1 = op.arena->allocate({num_experts + 1}, DType::kInt32);
  const Placement placement = allocate_placement(op, ranks, num_experts);
  sort_by_expert(op, saved.routing.expert_ids_TK, saved.routing.counts_E, 1, sent_offsets_E1, routing.slot_of_sent_TK,
                 routing.sent_of_slot_TK);
  if (op.measuring()) return;
  group_.all_gather(saved.routing.counts_E, counts_PE, saved.layer.name).wait();
  place_rows(counts_PE, saved.layer.alignment, placement);
  const std::string overload =
      find_overload(counts_PE, placement, saved.layer, saved.num_rows(), options().capacity_factor);
  if (!overload.empty()) throw Error(overload);

  const auto* counts = counts_PE.data<std::int32_t>();
  const auto* sent_offsets = sent_offsets_E1.data<std::int32_t>();
  const std::int64_t first_expert = group_.rank() * local;
  auto* source_of_row = routing.source_of_row_R.data<std::int32_t>();
  auto* row_of_received = routing.row_of_received_R.data<std::int32_t>();
  std::copy_n(placement.offsets_Pe1.data<std::int32_t>() + group_.rank() * (local + 1), local + 1,
              saved.offsets_e1.data<std::int32_t>());
  std::fill_n(source_of_row, saved.num_rows(), -1);
  std::int32_t received = 0;
  for (std::int64_t source = 0; source < ranks; ++source) {
    const std::int32_t before = received;
    for (std::int64_t x = first_expert; x < first_expert + local; ++x) {
      std::int32_t row = placement.first_row_PE.data<std::int32_t>()[source * num_experts + x];
      for (std::int32_t i = 0; i < counts[source * num_experts + x]; ++i, ++row, ++received) {
        source_of_row[row] = received;
        row_of_received[received] = row;
      }
    }
    routing.num_received_P.data<std::int32_t>()[source] = received - before;
    routing.num_sent_P.data<std::int32_t>()[source] = sent_offsets[(source + 1) * local] - sent_offsets[source * local];
  }
}

Work StandardDispatcher::to_experts(const Tensor& sent, const Tensor& received, const DispatchSaved& saved,
                                    std::string_view operation) {
  const auto& routing = std::get<StandardRouting>(saved.backend);
  return group_.all_to_all_v(sent, host_counts(routing.num_sent_P), received, host_counts(routing.num_received_P),
                             fmt::format("{} of {}", operation, saved.layer.name));
}

Work StandardDispatcher::from_experts(const Tensor& returned, const Tensor& back, const DispatchSaved& saved,
                                      std::string_view operation) {
  const auto& routing = std::get<StandardRouting>(saved.backend);
  return group_.all_to_all_v(returned, host_counts(routing.num_received_P), back, host_counts(routing.num_sent_P),
                             fmt::format("{} of {}", operation, saved.layer.name));
}

void StandardDispatcher::send_tokens(const Context& op, const Tensor& y_TD, PayloadPrecision precision,
                                     const DispatchSaved& saved, const GemmOperand& x_RD, std::string_view operation) {
  const auto& routing = std::get<StandardRouting>(saved.backend);
  const auto allocate = [&](const Shape& shape, DType dtype) { return op.arena->allocate(shape, dtype); };
  const auto allocate_rows = [&](std::int64_t count) {
    return allocate_payload(count, options().dim, options().dtype, precision, allocate);
  };
  const Payload tokens = make_payload(op, y_TD, precision);
  const Payload sent = allocate_rows(saved.num_tokens() * options().top_k);
  const Payload received = allocate_rows(saved.num_rows());
  std::array<Work, 2> work;
  for (std::size_t i = 0; i < work.size(); ++i) {
    const Tensor part = sent.parts()[i];
    if (!part.defined()) continue;
    gather_row_bytes(op, tokens.parts()[i], routing.slot_of_sent_TK, options().top_k, part);
    if (!op.measuring()) work[i] = to_experts(part, received.parts()[i], saved, operation);
  }
  for (Work& part : work) part.wait();
  deliver_rows(op, received, options().dtype, routing.source_of_row_R, saved.num_rows_1(), x_RD);
}

void StandardDispatcher::do_dispatch(const Context& op, const Tensor& y_TD, const DispatchSaved& saved,
                                     const GemmOperand& x_RD) {
  const auto& routing = std::get<StandardRouting>(saved.backend);
  {
    const ArenaScope scope(*op.arena);
    plan(op, saved);
  }
  {
    const ArenaScope scope(*op.arena);
    const Tensor sent = op.arena->allocate(routing.slot_of_sent_TK.shape(), DType::kFloat32);
    const Tensor received = op.arena->allocate({saved.num_rows()}, DType::kFloat32);
    gather_numbers(op, saved.routing.weights_TK, routing.slot_of_sent_TK, sent);
    if (!op.measuring()) to_experts(sent, received, saved, "weights").wait();
    gather_numbers(op, received, routing.source_of_row_R, saved.weights_R);
  }
  send_tokens(op, y_TD, options().dispatch_forward, saved, x_RD, "dispatch");
}

void StandardDispatcher::do_dispatch_again(const Context& op, const Tensor& y_TD, const DispatchSaved& saved,
                                           const GemmOperand& x_RD) {
  send_tokens(op, y_TD, options().dispatch_forward, saved, x_RD, "dispatch again");
}

void StandardDispatcher::do_combine_backward(const Context& op, const Tensor& d_y_TD, const DispatchSaved& saved,
                                             const GemmOperand& d_out_RD) {
  send_tokens(op, d_y_TD, options().combine_backward, saved, d_out_RD, "combine backward");
}

void StandardDispatcher::return_rows(const Context& op, const Tensor& x_RD, const float* weights_TK,
                                     const DispatchSaved& saved, const Tensor& y_TD, Write write,
                                     std::string_view operation) {
  const auto& routing = std::get<StandardRouting>(saved.backend);
  const std::int64_t num_tokens = saved.num_tokens(), top_k = options().top_k, dim = options().dim;
  const DType dtype = options().dtype;
  const Tensor returned = op.arena->allocate(x_RD.shape(), dtype);
  const Tensor back = op.arena->allocate({num_tokens * top_k, dim}, dtype);
  const std::int64_t max_ranks = std::min<std::int64_t>(top_k, num_ranks());
  const cpu::ThreadScratch scratch(op, static_cast<std::size_t>(max_ranks * dim) * size_of(dtype));
  if (op.measuring()) return;
  const Tensor rows = received_rows(routing);
  gather_row_bytes(op, x_RD, rows, 1, returned.rows(0, rows.dim(0)));
  from_experts(returned, back, saved, operation).wait();

  const auto* expert_ids = saved.routing.expert_ids_TK.data<std::int32_t>();
  const auto* sent_of_slot = routing.sent_of_slot_TK.data<std::int32_t>();
  const std::int64_t local = num_local_experts();
  parallel_ranges(num_tokens, kTokensPerTask, [&](std::int64_t begin, std::int64_t end) {
    std::vector<const void*> its_rows, sums;
    std::vector<float> its_weights;
    for (std::int64_t t = begin; t < end; ++t) {
      sums.clear();
      for (int rank = 0; rank < num_ranks(); ++rank) {
        its_rows.clear();
        its_weights.clear();
        for (std::int64_t slot = t * top_k; slot < (t + 1) * top_k; ++slot) {
          if (expert_ids[slot] / local != rank) continue;
          its_rows.push_back(row_bytes(back, sent_of_slot[slot]));
          if (weights_TK != nullptr) its_weights.push_back(weights_TK[slot]);
        }
        if (its_rows.empty()) continue;
        std::byte* sum = scratch.mine() + sums.size() * bytes_of_row(back);
        sum_rows(dtype, its_rows, weights_TK != nullptr ? its_weights.data() : nullptr, dim, Write::kAssign, sum);
        sums.push_back(sum);
      }
      sum_rows(dtype, sums, nullptr, dim, write, row_bytes(y_TD, t));
    }
  });
}

void StandardDispatcher::do_combine(const Context& op, const Tensor& out_RD, const DispatchSaved& saved,
                                    const Tensor& y_TD, Write write) {
  return_rows(op, out_RD, saved.routing.weights_TK.data<float>(), saved, y_TD, write, "combine");
}

void StandardDispatcher::do_dispatch_backward(const Context& op, const Tensor& d_x_RD, const Tensor& d_weights_R,
                                              const DispatchSaved& saved, const Tensor& d_y_TD, Write write,
                                              const Tensor& d_weights_TK) {
  const auto& routing = std::get<StandardRouting>(saved.backend);
  {
    const ArenaScope scope(*op.arena);
    const Tensor returned = op.arena->allocate({saved.num_rows()}, DType::kFloat32);
    const Tensor back = op.arena->allocate(routing.slot_of_sent_TK.shape(), DType::kFloat32);
    if (!op.measuring()) {
      const Tensor rows = received_rows(routing);
      gather_numbers(op, d_weights_R, rows, returned.rows(0, rows.dim(0)));
      from_experts(returned, back, saved, "weights' gradients").wait();
    }
    gather_numbers(op, back, routing.sent_of_slot_TK, d_weights_TK);
  }
  return_rows(op, d_x_RD, nullptr, saved, d_y_TD, write, "dispatch backward");
}

}  // namespace tessera::ep
