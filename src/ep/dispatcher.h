// Expert parallelism's data movement: an MoE layer's tokens go to the ranks of their experts, and come back.
//
// E experts are cut evenly over the P ranks of a group: rank r holds [r·e, (r+1)·e), with e = E/P. Every rank has t
// tokens, each with K different experts. A (token, k) pair is a row on the rank of its expert. A rank's rows are
// grouped by expert. A group begins at a multiple of the layer's alignment. Its tokens are in the order of their ranks,
// then in that of each rank. Rows between the end of a group and the next group are padding.
//
// A layer's forward is dispatch, experts, combine. Its backward is combine_backward, experts, dispatch_backward. All
// ranks make the same calls in the same order. A call ends when this rank's result is there. On a GPU, calls run on a
// stream of their own (ops/kit/call_stream.h). If the caller's context has another stream, that stream waits for them.
//
// Backends (ep/backends/make_dispatcher.h chooses; each keeps its own routing, which nobody else can read):
//   local      serves a group of one rank (ops/routing/permute.h).
//   standard   makes all-to-alls that the host drives. A token crosses once per expert. The host waits for the counts.
//   direct     stores into the other ranks' windows (ep/direct/protocol.h). A token crosses once per rank. On GPUs the
//              host waits for nothing, and learns of failures when it asks (check).
//
// Several domains. The ranks of a domain reach each other's memory, those of other domains do not. Then an exchange
// (ep/domain_exchange.h) brings each token once to every domain that has one of its experts, and brings sums back.
// Callers call it before and after this dispatcher, which is direct. The dispatcher's "tokens" are those that came, and
// its experts are the domain's. An expert's rows are in the order of their ranks' places in their domains, then of the
// domains, then of each rank.
//
// Sums. Both standard and direct sum a token's rows rank by rank, ascending. On each rank they sum in the order of k,
// in float32, and round to the layer's type. Then they sum these in float32 and round once. So both give the same bits.
// Over several domains, a domain sums so. The exchange adds the domains' sums, ascending, in float32, and rounds once
// more.
//
// Rounds. A rank has room for R rows. Where a rank gets more, they are worked off in rounds: `dispatch` finds how many
// there are, all ranks agree, and round i has each rank's rows [i·R, (i+1)·R). A later round is allocated like a layer,
// and makes the same calls. Its sums are added to the first round's. So a sum is rounded once per round. `direct` on
// GPUs counts the rounds there. In a recorded graph, later rounds are a loop, which the GPU repeats without the host.
//
// Payload. A token crosses unchanged, or in MXFP8 (E4M3 elements, a scale per 32 numbers of D, mode rceil). Its own
// rank quantizes it once. Its rows are then the numbers that this stands for. The payload of dispatch and
// dispatch_again is configured separately from that of combine_backward. `local` sends nothing and quantizes nothing.
#pragma once

#include <any>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/process_group.h"
#include "ep/dispatch_options.h"
#include "ep/turns.h"
#include "ops/kit/call_stream.h"
#include "ops/routing/permute.h"

namespace tessera {

/// Says how a layer's rows are laid out.
struct DispatchLayer {
  std::string_view name;       // in messages; outlives what is saved
  std::int64_t alignment = 1;  // in rows: each expert's rows begin at a multiple of it
};

/// Holds what a router chose for the t tokens of this rank.
struct TokenRouting {
  Tensor expert_ids_tK;  // int32; a token's ids differ
  Tensor weights_tK;     // float32
  Tensor counts_E;       // int32: (token, k) pairs per expert
};

class DomainExchange;
struct DomainExchangeSaved;

/// Holds what a layer keeps from its dispatch for the other calls. The routing's tensors must live as long.
struct DispatchSaved {
  DispatchLayer layer;
  TokenRouting routing;                                      // over several domains, of the tokens that came
  std::shared_ptr<const DomainExchangeSaved> exchange = {};  // null in one domain
  std::int64_t round = 0;
  // The members below are written by dispatch.
  // The number of rounds that this layer's rows need. A GPU that counts them has the number of later rounds and the
  // current round instead (int32), which all rounds share.
  std::shared_ptr<std::int64_t> num_rounds = {};
  Tensor rounds_2 = {};
  Tensor offsets_e1 = {};  // int32: rows [offsets[i], offsets[i + 1]) belong to the i-th local expert
  Tensor weights_R = {};   // float32: a row's routing weight, 0 for all that are padding
  std::any backend = {};   // what the backend keeps; only the backend knows its type

  /// Returns what the backend keeps. Throws std::bad_any_cast if it is of another type.
  template <typename Routing>
  const Routing& backend_as() const {
    return std::any_cast<const Routing&>(backend);
  }
  std::int64_t num_tokens() const { return routing.expert_ids_tK.dim(0); }
  std::int64_t num_rows() const { return weights_R.dim(0); }
  /// Returns the number of rows in use: the last number of offsets_e1, [1].
  Tensor num_rows_1() const { return offsets_e1.rows(offsets_e1.dim(0) - 1, offsets_e1.dim(0)); }
};

/// Shapes: y_tD and its gradients are [t, D], and rows are [R, D] with R = max_rows(t, alignment). All have the
/// options' type. Rows at and beyond the last offset are not read, and are not defined in any form. Callers give what
/// is sent as `plain`. Where its payload is MXFP8 they may give it as `rows` alone, which are sent unchanged.
///
/// Every call throws RankFailure if another rank has died or does not come within the group's timeout. Calls that do
/// not wait for the GPU do not throw it. check() does instead.
class Dispatcher {
 public:
  virtual ~Dispatcher();
  Dispatcher(const Dispatcher&) = delete;
  Dispatcher& operator=(const Dispatcher&) = delete;

  /// Returns the bytes that allocate() takes on this rank, besides the arena.
  std::size_t window_bytes() const;
  /// Allocates the windows. All ranks must call it together, before the first call that does not measure. Throws Error
  /// if there is not enough memory.
  void allocate();
  /// Returns the number of SMs that a call takes, while the others are free for other work. 0 means that a call takes
  /// all of them for a short time.
  virtual int num_sms() const { return 0; }
  /// Returns whether calls wait for the GPU, and so cannot be parts of a graph.
  virtual bool waits_for_gpu() const { return false; }
  /// Returns whether the capacity factor bounds the room. A load that exceeds it takes rounds. With a factor that has
  /// room for any load, none does.
  bool has_rounds() const { return options_.capacity_factor > 0.0 && has_peers(); }
  /// Returns the stream on which a caller may run a call beside other operators. If there are no other ranks, a call
  /// runs where its context says.
  CallStream call_stream(const Context& op, int num_sms = 0) const { return CallStream(op, num_sms, has_peers()); }
  /// Makes the calls of two passes take turns. Must be called before a step is measured. `turns` must outlive this.
  void set_turns(Turns* turns);
  /// Returns what set_turns() has set, or null.
  Turns* turns() const { return turns_; }
  /// Puts an exchange in front, for one of several domains. Must be called before anything is allocated.
  void set_exchange(std::unique_ptr<DomainExchange> exchange);
  /// Returns null if there is one domain.
  DomainExchange* exchange() const { return exchange_.get(); }
  /// Throws if a GPU's calls up to now have found that a rank did not come. Calls do nothing after that.
  virtual void check() {}

  /// Returns R, the number of rows that a rank has room for in a round.
  std::int64_t max_rows(std::int64_t num_tokens, std::int64_t alignment) const;
  /// Returns the number of those rows that a balanced load uses, with half an alignment of padding per expert.
  double expected_rows(std::int64_t num_tokens, std::int64_t alignment) const;
  /// Allocates what a layer keeps of its first round, from op's arena, and what the exchange keeps. `routing` is of
  /// this rank's tokens and of all experts.
  DispatchSaved allocate_saved(const Context& op, const DispatchLayer& layer, const TokenRouting& routing) const;
  /// Allocates the same for a later round of `first`.
  DispatchSaved allocate_later(const Context& op, const DispatchSaved& first, std::int64_t round) const {
    return allocate_round(op, {.layer = first.layer,
                               .routing = first.routing,
                               .exchange = first.exchange,
                               .round = round,
                               .rounds_2 = first.rounds_2});
  }
  /// Returns the number of rounds that the last dispatch of this layer has found. It waits for a GPU that counts them.
  /// While a step is measured it is the number of rounds that differ in what they allocate: 2 where rounds are
  /// possible.
  std::int64_t num_rounds(const Context& op, const DispatchSaved& first) const;
  /// Calls body(call, saved) for each round after the first, at least for those before `least`. `call` is the context
  /// of calls, which all of a round's operators use. `saved` and what the body allocates have memory until it returns.
  /// If a GPU counts rounds and a graph is being recorded, the body is called once, and the GPU repeats its operators.
  /// In turns, the caller must be in a Turns::Call until this returns.
  void for_later_rounds(const Context& op, const DispatchSaved& first, std::int64_t least,
                        const std::function<void(const Context& call, const DispatchSaved& saved)>& body) const;
  /// Adds the number of rounds after the first to sum_1 (float64, [1]). Where the host knows it, a step without such
  /// rounds runs no operator.
  virtual void add_later_rounds(const Context& op, const DispatchSaved& first, const Tensor& sum_1) const;

  /// Assigns the rows to x_RD, in those of its forms that are defined, and 0 to the padding. Also assigns what is saved
  /// from the routing. Where the payload has x_RD.rows' format, these are the very bytes that were sent.
  void dispatch(const Context& op, const GemmOperand& y_tD, const DispatchSaved& saved, const GemmOperand& x_RD);
  /// Assigns the same rows once more, for recomputation.
  void dispatch_again(const Context& op, const GemmOperand& y_tD, const DispatchSaved& saved, const GemmOperand& x_RD);
  /// Assigns or adds to y_tD[t] the sum of weight · row of out_RD over the token's rows.
  void combine(const Context& op, const Tensor& out_RD, const DispatchSaved& saved, const Tensor& y_tD, Write write);
  /// Assigns the gradient of out_RD to d_out_RD, in the forms that are defined, and 0 to the padding. It lacks the
  /// weight, which SwiGLU's backward applies.
  void combine_backward(const Context& op, const GemmOperand& d_y_tD, const DispatchSaved& saved,
                        const GemmOperand& d_out_RD);
  /// Assigns or adds to d_y_tD[t] the sum of the token's rows of d_x_RD. Assigns to d_weights_tK (float32) the token's
  /// numbers of d_weights_R, and 0 for choices of other rounds.
  void dispatch_backward(const Context& op, const Tensor& d_x_RD, const Tensor& d_weights_R, const DispatchSaved& saved,
                         const Tensor& d_y_tD, Write write, const Tensor& d_weights_tK);

  /// Returns the part of this rank's window that receives rows, [R, D]. If it is passed as x_RD.plain of a dispatch,
  /// the rows need no copy. They stay until the next dispatch of any layer, and callers may overwrite them. It is
  /// undefined for other backends and payloads. Where calls take turns, it is undefined for the first round, because
  /// the other pass's call may come next.
  Tensor rows_in_window(const Context& op, const DispatchSaved& saved) const {
    return may_leave_rows(saved) ? do_rows_in_window(op, saved) : Tensor();
  }
  /// Returns the same for d_out_RD.plain of combine_backward. The rows stay until the next combine_backward.
  Tensor gradients_in_window(const Context& op, const DispatchSaved& saved) const {
    return may_leave_rows(saved) ? do_gradients_in_window(op, saved) : Tensor();
  }

  const DispatchOptions& options() const { return options_; }

 protected:
  /// Throws Error if so many rows cannot be counted.
  Dispatcher(const DispatchOptions& options, int num_ranks);

  /// Calls run(round) for the later rounds, or records them.
  virtual void repeat(const Context& op, const DispatchSaved& first, std::int64_t least,
                      const std::function<void(std::int64_t round)>& run) const;
  /// Lets the other pass run while what this call has sent is on its way (ep/turns.h). A backend that waits for data
  /// calls this before its longest wait. For other backends, as_call() calls it at the end of each call. It does
  /// nothing in calls of later rounds, since not all ranks of other groups make them. It does nothing over several
  /// domains either: there the exchange lets the other pass run, because its transfers take longest.
  void give_way(const DispatchSaved& saved) {
    if (turns_ != nullptr && saved.round == 0 && saved.exchange == nullptr) turns_->give_way();
  }
  int num_ranks() const { return num_ranks_; }
  std::int64_t num_local_experts() const { return options_.num_experts / num_ranks_; }
  /// Returns the number of rows that a rank's experts get when the load is balanced.
  double balanced_rows(std::int64_t num_tokens) const {
    return static_cast<double>(num_tokens * options_.top_k) / static_cast<double>(options_.num_domains);
  }

 private:
  bool has_peers() const { return num_ranks_ * options_.num_domains > 1; }
  /// Returns whether rows may stay in the window after a call, because the next call is of the same pass. In turns this
  /// holds for later rounds, which belong to one call of their pass (for_later_rounds).
  bool may_leave_rows(const DispatchSaved& saved) const { return turns_ == nullptr || saved.round > 0; }
  /// Runs body(call) as a call, with the calls' context. The call gives way at its end.
  template <typename Body>
  void as_call(const Context& op, const DispatchSaved& saved, Body&& body);
  /// Completes what a layer keeps of a round.
  DispatchSaved allocate_round(const Context& op, DispatchSaved saved) const;
  virtual std::size_t do_window_bytes() const { return 0; }
  virtual void do_allocate() {}
  /// Returns the number of rounds that the last dispatch has found.
  virtual std::int64_t found_rounds(const Context& op, const DispatchSaved& first) const;
  // The functions below are the backend's part of each call, after the operands were checked. They are also called when
  // a step is measured.
  virtual void allocate_backend(const Context& op, DispatchSaved& saved) const = 0;
  virtual void do_dispatch(const Context& op, const GemmOperand& y_tD, const DispatchSaved& saved,
                           const GemmOperand& x_RD) = 0;
  virtual void do_dispatch_again(const Context& op, const GemmOperand& y_tD, const DispatchSaved& saved,
                                 const GemmOperand& x_RD) = 0;
  virtual void do_combine(const Context& op, const Tensor& out_RD, const DispatchSaved& saved, const Tensor& y_tD,
                          Write write) = 0;
  virtual void do_combine_backward(const Context& op, const GemmOperand& d_y_tD, const DispatchSaved& saved,
                                   const GemmOperand& d_out_RD) = 0;
  virtual void do_dispatch_backward(const Context& op, const Tensor& d_x_RD, const Tensor& d_weights_R,
                                    const DispatchSaved& saved, const Tensor& d_y_tD, Write write,
                                    const Tensor& d_weights_tK) = 0;
  virtual Tensor do_rows_in_window(const Context& /*op*/, const DispatchSaved& /*saved*/) const { return {}; }
  virtual Tensor do_gradients_in_window(const Context& /*op*/, const DispatchSaved& /*saved*/) const { return {}; }

  /// Records a call of a dry run. Where there is an exchange, its calls stand for both.
  void note(const Context& op, const char* call, PayloadPrecision precision, const DispatchSaved& saved) const;
  void check_tokens(const Tensor& y_tD, const DispatchSaved& saved) const;
  void check_payload(const GemmOperand& y_tD, PayloadPrecision precision, const DispatchSaved& saved) const;
  void check_rows(const GemmOperand& x_RD, const DispatchSaved& saved) const;

  DispatchOptions options_;
  int num_ranks_;
  Turns* turns_ = nullptr;
  std::unique_ptr<DomainExchange> exchange_;
};

}  // namespace tessera
