#include "ep/direct/direct_dispatcher.h"

#include <algorithm>
#include <cstring>

#include "tensor/parallel.h"

namespace tessera::ep {
namespace {

/// All tensors are int32. A slot is t·K + k.
struct DirectRouting {
  /// For each of this rank's tokens: the ranks that get a copy, ascending, and the copy's first row there.
  Tensor rank_tJ, first_row_tJ;
  /// For each of this rank's slots, its row on the rank of its expert, or -1 if it has none in this round.
  Tensor row_of_slot_tK;
  /// The copies that this rank received: their number, where the sum of each goes, and its rows (of `rows_Q1`) with
  /// their slots, in the order of k.
  Tensor num_copies_1, home_Q, place_Q, rows_Q1, row_of_choice_R, slot_of_choice_R;
  /// For each row, the row that holds its token: itself, or the first row of the copy.
  Tensor source_of_row_R;
};

const DirectRouting& direct_routing(const DispatchSaved& saved) { return saved.backend_as<DirectRouting>(); }

}  // namespace

void DirectDispatcher::allocate_backend(const Context& op, DispatchSaved& saved) const {
  const auto ints = [&](const Shape& shape) { return op.arena->allocate(shape, DType::kInt32); };
  const std::int64_t num_rows = saved.num_rows();
  const std::int64_t max_copies = std::min(num_rows, num_ranks() * saved.num_tokens());
  saved.backend = DirectRouting{
      .rank_tJ = ints({saved.num_tokens(), max_ranks_of_token()}),
      .first_row_tJ = ints({saved.num_tokens(), max_ranks_of_token()}),
      .row_of_slot_tK = ints(saved.routing.expert_ids_tK.shape()),
      .num_copies_1 = ints({1}),
      .home_Q = ints({max_copies}),
      .place_Q = ints({max_copies}),
      .rows_Q1 = ints({max_copies + 1}),
      .row_of_choice_R = ints({num_rows}),
      .slot_of_choice_R = ints({num_rows}),
      .source_of_row_R = ints({num_rows}),
  };
}

template <typename Store, typename Read>
void DirectDispatcher::run(Call call, const DispatchSaved& saved, Store&& store, Read&& read) {
  const CallSequence::Entry entry = sequence_.next(call);
  for (const Step& step : entry.steps) {
    if (hook_ != nullptr) hook_->before(step);
    switch (step.action) {
      case Step::Action::kStore:
        store(step.buffer);
        break;
      case Step::Action::kSignal:
        signal(step.flag, entry.epoch);
        break;
      case Step::Action::kAwait:
        if (step.flag == Flag::kStored) give_way(saved);
        await(call, step.flag, entry.epoch, saved);
        break;
      case Step::Action::kRead:
        read(step.buffer);
        break;
    }
  }
}

void DirectDispatcher::signal(Flag flag, std::uint64_t epoch) {
  for (int peer = 0; peer < num_ranks(); ++peer) {
    window_.flag(peer, flag, group_.rank()).store(epoch, std::memory_order_release);
  }
}

void DirectDispatcher::await(Call call, Flag flag, std::uint64_t epoch, const DispatchSaved& saved) {
  for (int source = 0; source < num_ranks(); ++source) {
    const std::atomic<std::uint64_t>& word = window_.flag(group_.rank(), flag, source);
    group_.wait_until(
        name_of(call), saved.layer.name, source, [&] { return word.load(std::memory_order_acquire) >= epoch; },
        [&] { return missing(flag, source, epoch, word.load()); });
  }
}

void DirectDispatcher::store_counts(const DispatchSaved& saved) {
  for (int peer = 0; peer < num_ranks(); ++peer) {
    const Tensor counts_PE = window_.counts_PE(peer);
    std::memcpy(row_bytes(counts_PE, group_.rank()), saved.routing.counts_E.raw(), bytes_of_row(counts_PE));
  }
}

void DirectDispatcher::store_records(const Placement& placement, const Tensor& next_row_E, const DispatchSaved& saved) {
  const DirectRouting& routing = direct_routing(saved);
  const std::int64_t num_tokens = saved.num_tokens(), top_k = options().top_k;
  const std::int64_t num_experts = options().num_experts, local = num_local_experts(),
                     max_places = max_ranks_of_token();
  const auto* expert_ids = saved.routing.expert_ids_tK.data<std::int32_t>();
  const auto* weights = saved.routing.weights_tK.data<float>();
  const auto* counts = saved.routing.counts_E.data<std::int32_t>();
  const auto* first_row = placement.first_row_PE.data<std::int32_t>() + group_.rank() * num_experts;
  auto* next_row = next_row_E.data<std::int32_t>();
  auto* ranks = routing.rank_tJ.data<std::int32_t>();
  auto* first_rows = routing.first_row_tJ.data<std::int32_t>();
  auto* row_of_slot = routing.row_of_slot_tK.data<std::int32_t>();
  std::fill_n(row_of_slot, routing.row_of_slot_tK.num_elements(), -1);
  std::copy_n(first_row, num_experts, next_row);
  std::fill_n(ranks, routing.rank_tJ.num_elements(), -1);
  std::vector<std::int32_t> num_copies(static_cast<std::size_t>(num_ranks()), 0);
  struct Choice {
    int rank;
    CopyChoice choice;
  };
  std::vector<Choice> choices(static_cast<std::size_t>(top_k));
  for (std::int64_t t = 0; t < num_tokens; ++t) {
    std::size_t num_choices = 0;
    for (std::int64_t k = 0; k < top_k; ++k) {
      const std::int32_t expert = expert_ids[t * top_k + k];
      if (expert == kNoExpert) continue;
      TESSERA_CHECK(0 <= expert && expert < num_experts, "token {}: expert {} of {}", t, expert, num_experts);
      const std::int32_t row = next_row[expert]++;
      TESSERA_CHECK(row < first_row[expert] + counts[expert], "expert {} has more than the {} rows counted", expert,
                    counts[expert]);
      if (rows_in_round(row, 1, saved.num_rows()).size() == 0) continue;
      row_of_slot[t * top_k + k] = row;
      // Choices are sorted by ascending rank, then by k.
      const auto rank = static_cast<int>(expert / local);
      std::size_t at = num_choices++;
      for (; at > 0 && choices[at - 1].rank > rank; --at) choices[at] = choices[at - 1];
      choices[at] = {rank, {row, static_cast<std::int32_t>(k), weights[t * top_k + k]}};
    }
    std::int32_t place = 0;
    for (std::size_t i = 0; i < num_choices; ++place) {
      const int rank = choices[i].rank;
      ranks[t * max_places + place] = rank;
      first_rows[t * max_places + place] = choices[i].choice.row;
      CopyRecord* copy = window_.copy(rank, group_.rank(), num_copies[static_cast<std::size_t>(rank)]++);
      std::int32_t num_rows = 0;
      for (; i < num_choices && choices[i].rank == rank; ++i) {
        TESSERA_CHECK(num_rows < local, "token {} has one expert twice", t);
        DirectWindow::choices(copy)[num_rows++] = choices[i].choice;
      }
      *copy = {static_cast<std::int32_t>(t), place, num_rows};
    }
  }
  for (int peer = 0; peer < num_ranks(); ++peer) {
    window_.num_copies_P(peer).data<std::int32_t>()[group_.rank()] = num_copies[static_cast<std::size_t>(peer)];
  }
  for (std::int64_t x = 0; x < num_experts; ++x) {
    TESSERA_CHECK(next_row[x] == first_row[x] + counts[x], "expert {} has {} rows, counted {}", x,
                  next_row[x] - first_row[x], counts[x]);
  }
}

void DirectDispatcher::store_tokens(const Payload& tokens, Buffer buffer, const DispatchSaved& saved) {
  const DirectRouting& routing = direct_routing(saved);
  std::vector<std::array<Tensor, 2>> targets;
  for (int peer = 0; peer < num_ranks(); ++peer) targets.push_back(rows_of(peer, buffer, saved).parts());
  const std::array<Tensor, 2> parts = tokens.parts();
  const auto* ranks = routing.rank_tJ.data<std::int32_t>();
  const auto* first_rows = routing.first_row_tJ.data<std::int32_t>();
  parallel_ranges(saved.num_tokens(), kTokensPerTask, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      for (std::int64_t at = t * max_ranks_of_token(); at < (t + 1) * max_ranks_of_token() && ranks[at] >= 0; ++at) {
        const std::array<Tensor, 2>& target = targets[static_cast<std::size_t>(ranks[at])];
        for (std::size_t i = 0; i < parts.size() && parts[i].defined(); ++i) {
          std::memcpy(row_bytes(target[i], first_rows[at]), row_bytes(parts[i], t), bytes_of_row(parts[i]));
        }
      }
    }
  });
}

void DirectDispatcher::read_records(const DispatchSaved& saved) {
  const DirectRouting& routing = direct_routing(saved);
  const auto* num_copies = window_.num_copies_P(group_.rank()).data<std::int32_t>();
  auto* home = routing.home_Q.data<std::int32_t>();
  auto* place = routing.place_Q.data<std::int32_t>();
  auto* rows_begin = routing.rows_Q1.data<std::int32_t>();
  auto* row_of_choice = routing.row_of_choice_R.data<std::int32_t>();
  auto* slot_of_choice = routing.slot_of_choice_R.data<std::int32_t>();
  auto* source_of_row = routing.source_of_row_R.data<std::int32_t>();
  auto* weights = saved.weights_R.data<float>();
  std::fill_n(source_of_row, saved.num_rows(), -1);
  std::fill_n(weights, saved.num_rows(), 0.0f);
  std::int32_t copies = 0, choices = 0;
  rows_begin[0] = 0;
  for (int source = 0; source < num_ranks(); ++source) {
    for (std::int32_t i = 0; i < num_copies[source]; ++i, ++copies) {
      CopyRecord* copy = window_.copy(group_.rank(), source, i);
      const CopyChoice* copy_choices = DirectWindow::choices(copy);
      home[copies] = source;
      place[copies] = static_cast<std::int32_t>(copy->token * max_ranks_of_token()) + copy->place;
      for (std::int32_t c = 0; c < copy->num_rows; ++c, ++choices) {
        const auto& [row, k, weight] = copy_choices[c];
        row_of_choice[choices] = row;
        slot_of_choice[choices] = static_cast<std::int32_t>(copy->token * options().top_k) + k;
        source_of_row[row] = copy_choices[0].row;
        weights[row] = weight;
      }
      rows_begin[copies + 1] = choices;
    }
  }
  routing.num_copies_1.data<std::int32_t>()[0] = copies;
}

void DirectDispatcher::deliver(const Context& op, Buffer buffer, const DispatchSaved& saved, const GemmOperand& x_RD) {
  deliver_rows(op, rows_of(group_.rank(), buffer, saved), options().dtype, direct_routing(saved).source_of_row_R,
               saved.num_rows_1(), x_RD);
}

void DirectDispatcher::do_dispatch(const Context& op, const GemmOperand& y_tD, const DispatchSaved& saved,
                                   const GemmOperand& x_RD) {
  const Placement placement = allocate_placement(op, num_ranks(), options().num_experts);
  const Tensor next_row_E = op.arena->allocate({options().num_experts}, DType::kInt32);
  const Payload tokens = make_payload(op, y_tD, options().dispatch_forward);
  if (op.measuring()) return deliver(op, Buffer::kRows, saved, x_RD);
  const auto store = [&](Buffer buffer) {
    if (buffer == Buffer::kCounts) return store_counts(saved);
    store_records(placement, next_row_E, saved);
    store_tokens(tokens, Buffer::kRows, saved);
  };
  const auto read = [&](Buffer buffer) {
    if (buffer == Buffer::kCounts) {
      place_rows(window_.counts_PE(group_.rank()), saved.layer.alignment, placement);
      *saved.num_rounds = count_rounds(placement, saved.num_rows());
      cut_to_round(placement, saved.round, saved.num_rows());
    } else {
      std::memcpy(saved.offsets_e1.raw(), row_bytes(placement.offsets_Pe1, group_.rank()),
                  saved.offsets_e1.num_bytes());
      read_records(saved);
      deliver(op, Buffer::kRows, saved, x_RD);
    }
  };
  run(Call::kDispatch, saved, store, read);
}

void DirectDispatcher::send_tokens(Call call, Buffer buffer, PayloadPrecision precision, const Context& op,
                                   const GemmOperand& y_tD, const DispatchSaved& saved, const GemmOperand& x_RD) {
  const Payload tokens = make_payload(op, y_tD, precision);
  if (op.measuring()) return deliver(op, buffer, saved, x_RD);
  run(
      call, saved, [&](Buffer target) { store_tokens(tokens, target, saved); },
      [&](Buffer) { deliver(op, buffer, saved, x_RD); });
}

void DirectDispatcher::do_dispatch_again(const Context& op, const GemmOperand& y_tD, const DispatchSaved& saved,
                                         const GemmOperand& x_RD) {
  send_tokens(Call::kDispatchAgain, Buffer::kRows, options().dispatch_forward, op, y_tD, saved, x_RD);
}

void DirectDispatcher::do_combine_backward(const Context& op, const GemmOperand& d_y_tD, const DispatchSaved& saved,
                                           const GemmOperand& d_out_RD) {
  send_tokens(Call::kCombineBackward, Buffer::kGradients, options().combine_backward, op, d_y_tD, saved, d_out_RD);
}

void DirectDispatcher::store_sums(const Tensor& x_RD, const float* weights_R, const DispatchSaved& saved) {
  const DirectRouting& routing = direct_routing(saved);
  const auto* home = routing.home_Q.data<std::int32_t>();
  const auto* place = routing.place_Q.data<std::int32_t>();
  const auto* rows_begin = routing.rows_Q1.data<std::int32_t>();
  const auto* row_of_choice = routing.row_of_choice_R.data<std::int32_t>();
  std::vector<Tensor> sums;
  for (int peer = 0; peer < num_ranks(); ++peer) sums.push_back(window_.sums(peer));
  const std::int64_t num_copies = routing.num_copies_1.data<std::int32_t>()[0];
  parallel_ranges(num_copies, kTokensPerTask, [&](std::int64_t begin, std::int64_t end) {
    std::vector<const void*> rows;
    std::vector<float> weights;
    for (std::int64_t copy = begin; copy < end; ++copy) {
      rows.clear();
      weights.clear();
      for (std::int32_t i = rows_begin[copy]; i < rows_begin[copy + 1]; ++i) {
        rows.push_back(row_bytes(x_RD, row_of_choice[i]));
        if (weights_R != nullptr) weights.push_back(weights_R[row_of_choice[i]]);
      }
      sum_rows(options().dtype, rows, weights_R != nullptr ? weights.data() : nullptr, options().dim, Write::kAssign,
               row_bytes(sums[static_cast<std::size_t>(home[copy])], place[copy]));
    }
  });
}

void DirectDispatcher::add_sums(const DispatchSaved& saved, const Tensor& y_tD, Write write) {
  const auto* ranks = direct_routing(saved).rank_tJ.data<std::int32_t>();
  const Tensor sums = window_.sums(group_.rank());
  parallel_ranges(saved.num_tokens(), kTokensPerTask, [&](std::int64_t begin, std::int64_t end) {
    std::vector<const void*> sums_of_token;
    for (std::int64_t t = begin; t < end; ++t) {
      sums_of_token.clear();
      for (std::int64_t at = t * max_ranks_of_token(); at < (t + 1) * max_ranks_of_token() && ranks[at] >= 0; ++at) {
        sums_of_token.push_back(row_bytes(sums, at));
      }
      sum_rows(options().dtype, sums_of_token, nullptr, options().dim, write, row_bytes(y_tD, t));
    }
  });
}

void DirectDispatcher::do_combine(const Context& op, const Tensor& out_RD, const DispatchSaved& saved,
                                  const Tensor& y_tD, Write write) {
  if (op.measuring()) return;
  run(
      Call::kCombine, saved, [&](Buffer) { store_sums(out_RD, saved.weights_R.data<float>(), saved); },
      [&](Buffer) { add_sums(saved, y_tD, write); });
}

void DirectDispatcher::do_dispatch_backward(const Context& op, const Tensor& d_x_RD, const Tensor& d_weights_R,
                                            const DispatchSaved& saved, const Tensor& d_y_tD, Write write,
                                            const Tensor& d_weights_tK) {
  if (op.measuring()) return;
  const auto store = [&](Buffer) {
    store_sums(d_x_RD, nullptr, saved);
    const DirectRouting& routing = direct_routing(saved);
    const auto* rows_begin = routing.rows_Q1.data<std::int32_t>();
    for (std::int32_t copy = 0; copy < routing.num_copies_1.data<std::int32_t>()[0]; ++copy) {
      auto* d_weights = window_.d_weights_tK(routing.home_Q.data<std::int32_t>()[copy]).data<float>();
      for (std::int32_t i = rows_begin[copy]; i < rows_begin[copy + 1]; ++i) {
        d_weights[routing.slot_of_choice_R.data<std::int32_t>()[i]] =
            d_weights_R.data<float>()[routing.row_of_choice_R.data<std::int32_t>()[i]];
      }
    }
  };
  const auto read = [&](Buffer) {
    add_sums(saved, d_y_tD, write);
    const auto* row_of_slot = direct_routing(saved).row_of_slot_tK.data<std::int32_t>();
    const auto* received = window_.d_weights_tK(group_.rank()).data<float>();
    auto* d_weights = d_weights_tK.data<float>();
    for (std::int64_t slot = 0; slot < d_weights_tK.num_elements(); ++slot) {
      d_weights[slot] = row_of_slot[slot] >= 0 ? received[slot] : 0.0f;
    }
  };
  run(Call::kDispatchBackward, saved, store, read);
}

}  // namespace tessera::ep
