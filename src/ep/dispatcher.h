// Tokens to the ranks of their experts, and back: the data movement of an MoE layer under expert parallelism.
//
// E experts are cut evenly over the P ranks of a group: rank r holds [r·e, (r+1)·e), e = E/P. Every rank has t tokens,
// each with K different experts; a (token, k) pair is a row on the rank of its expert. A rank's rows are grouped by
// expert; a group begins at a multiple of the layer's alignment, and has the tokens in the order of their ranks, then
// of their own. Rows between the end of a group and the next are padding.
//
// A layer's forward is dispatch, experts, combine; its backward combine_backward, experts, dispatch_backward. All ranks
// make the same calls in the same order. A call ends when this rank's result is there.
//
//   local     a group of one rank (ops/routing/permute.h).
//   standard  two all-to-alls that the host drives, one copy of a token per expert; the host waits for the counts.
//   direct    stores into the other ranks' windows (protocol.h), one copy of a token per rank. On GPUs the host waits
//             for nothing, and learns of failures when it asks (check).
//   two-level direct within domains of ranks that reach each other's memory, all-to-alls that the host drives between
//             them, one copy of a token per domain (two_level_dispatcher.h). Tokens of an expert's rows are in the
//             order of their ranks' places in their domains, then of the domains, then of their own.
//
// Sums. Both standard and direct sum a token's rows rank by rank, ascending: on each rank in the order of k, in
// float32, rounded to the layer's type; then these in float32, rounded once. So they give the same bits. Two-level sums
// so within a domain; then it adds the domains' sums, ascending, in float32, and rounds once more.
//
// Payload. A token crosses as it is, or in MXFP8 (E4M3 elements, a scale per 32 numbers of D, mode rceil), quantized
// once by its own rank; then its rows are the numbers that this stands for. Both for what dispatch and dispatch_again
// send and, separately, for what combine_backward sends. local sends nothing, and quantizes nothing.
#pragma once

#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "comm/process_group.h"
#include "ep/dispatch_options.h"
#include "ep/protocol.h"
#include "ops/routing/permute.h"

namespace tessera {

struct DispatchSaved;

/// How a layer's rows are laid out.
struct DispatchLayer {
  std::string_view name;  // in messages; outlives what is saved
  std::int64_t alignment = 1;
};

/// What a router chose for the t tokens of this rank.
struct TokenRouting {
  Tensor expert_ids_tK;  // int32, those of a token different
  Tensor weights_tK;     // float32
  Tensor counts_E;       // int32: (token, k) pairs per expert
};

namespace ep {

// What each backend keeps from a dispatch. All tensors are int32. A slot is t·K + k; -1 stands for none.

struct LocalRouting {
  Tensor slot_of_row_R, row_of_slot_tK;
};

/// Sent rows are this rank's slots, sorted by expert. Received rows are ordered by source rank, then expert, then
/// token.
struct StandardRouting {
  Tensor slot_of_sent_tK, sent_of_slot_tK;
  Tensor source_of_row_R, row_of_received_R;
  /// Numbers of rows to each rank and from it. They are on the host, which drives the collectives.
  struct Counts {
    std::vector<std::int64_t> num_sent_P, num_received_P;
  };
  std::shared_ptr<Counts> counts;
};

struct DirectRouting {
  /// For each of this rank's tokens: the ranks that get a copy, ascending, and the copy's first row there.
  Tensor rank_tJ, first_row_tJ;
  /// The copies that this rank received: their number, where the sum of each goes, and its rows (of `rows_Q1`) with
  /// their slots, in the order of k.
  Tensor num_copies_1, home_Q, place_Q, rows_Q1, row_of_choice_R, slot_of_choice_R;
  /// For each row, the row that holds its token: itself, or the first row of the copy.
  Tensor source_of_row_R;
};

/// The same on GPUs, for a group of P ranks.
struct GpuDirectRouting {
  Tensor rank_tJ, first_row_tJ;
  /// For each token of each rank: which of the token's copies this rank received, in the order of ranks, or -1. For
  /// each choice of such a token its row here, or -1 if its expert is on another rank.
  Tensor place_Pt, row_PtK;
  Tensor source_of_row_R;
  /// For each local expert, the row after its last one, where its padding begins.
  Tensor ends_e;
};

/// What two-level keeps, with N domains. Up to N·t tokens cross between domains each way, each token once per domain.
struct TwoLevelRouting {
  /// This rank's tokens in the order in which they are sent, domain by domain.
  Tensor token_of_sent_Nt;
  /// sent_of_token: place of a token among those sent to a domain; N·t if it is not sent there. number_of_slot: place
  /// of a choice's number among the numbers, K per token, that come back.
  Tensor sent_of_token_tN, number_of_slot_tK;
  /// Numbers of tokens to each domain and from it, on the host.
  struct Counts {
    std::vector<std::int64_t> num_sent_N, num_received_N;
  };
  std::shared_ptr<Counts> counts;
  /// The dispatch within the domain, of the t' = N·t tokens that this rank received. It owns its routing.
  std::shared_ptr<DispatchSaved> within;
};

}  // namespace ep

/// What a layer keeps from its dispatch for the other calls. It holds the routing's tensors, which must live as long.
struct DispatchSaved {
  DispatchLayer layer;
  TokenRouting routing;
  // Written by dispatch.
  Tensor offsets_e1;  // int32: rows [offsets[i], offsets[i + 1]) are the i-th local expert's
  Tensor weights_R;   // float32: a row's routing weight, 0 for all that are padding
  std::variant<ep::LocalRouting, ep::StandardRouting, ep::DirectRouting, ep::GpuDirectRouting, ep::TwoLevelRouting>
      backend;

  std::int64_t num_tokens() const { return routing.expert_ids_tK.dim(0); }
  std::int64_t num_rows() const { return weights_R.dim(0); }
  /// Returns the number of rows in use: the last number of offsets_e1, [1].
  Tensor num_rows_1() const { return offsets_e1.rows(offsets_e1.dim(0) - 1, offsets_e1.dim(0)); }
};

/// Shapes: y_tD and its gradients [t, D], rows [R, D] with R = max_rows(t, alignment), of the options' type. Rows at
/// and beyond the last offset are neither read nor, in any form, defined. What is sent is given plain; where its
/// payload is MXFP8, it may be given as `rows` alone, which are sent as they are.
///
/// Every call throws RankFailure if another rank has died or does not come within the group's timeout. Calls that do
/// not wait for the GPU throw neither this nor Error for too many rows: check() does.
class Dispatcher {
 public:
  virtual ~Dispatcher() = default;
  Dispatcher(const Dispatcher&) = delete;
  Dispatcher& operator=(const Dispatcher&) = delete;

  /// Bytes that allocate() takes on this rank, besides the arena.
  virtual std::size_t window_bytes() const { return 0; }
  /// Allocates the windows. All ranks must call it together, before the first call that does not measure. Throws Error
  /// if there is not enough memory.
  virtual void allocate() {}
  /// SMs of a GPU that a call takes, while the others are free for other work. 0: a call takes all of them, for a short
  /// time.
  virtual int num_sms() const { return 0; }
  /// Whether calls wait for the GPU, and so cannot be parts of a graph.
  virtual bool waits_for_gpu() const { return false; }
  /// Throws what a GPU's calls up to now would have thrown: once for too many rows, where combine gave NaN; again
  /// and again for a rank that did not come, after which calls do nothing.
  virtual void check() {}

  std::int64_t max_rows(std::int64_t num_tokens, std::int64_t alignment) const;
  /// Allocates what a layer keeps, from op's arena.
  DispatchSaved allocate_saved(const Context& op, const DispatchLayer& layer, const TokenRouting& routing) const;

  /// x_RD (=) the rows, padding 0, in those of its forms that are defined, and what is saved from the routing. Where
  /// the payload has x_RD.rows' format, these are the very bytes that were sent. Throws Error, on all ranks, if a rank
  /// gets more rows than it has room for; the calls of that layer that follow are then not to be made.
  void dispatch(const Context& op, const GemmOperand& y_tD, const DispatchSaved& saved, const GemmOperand& x_RD);
  /// Gives the same rows once more, for recomputation.
  void dispatch_again(const Context& op, const GemmOperand& y_tD, const DispatchSaved& saved, const GemmOperand& x_RD);
  /// Assigns or adds to y_tD[t] the sum of weight · row of out_RD over the token's rows.
  void combine(const Context& op, const Tensor& out_RD, const DispatchSaved& saved, const Tensor& y_tD, Write write);
  /// d_out_RD (=) the gradient of out_RD without the weight, which comes in with SwiGLU's backward; padding 0. In the
  /// forms that are defined.
  void combine_backward(const Context& op, const GemmOperand& d_y_tD, const DispatchSaved& saved,
                        const GemmOperand& d_out_RD);
  /// Assigns or adds to d_y_tD[t] the sum of the token's rows of d_x_RD. Assigns to d_weights_tK (float32) the token's
  /// numbers of d_weights_R.
  void dispatch_backward(const Context& op, const Tensor& d_x_RD, const Tensor& d_weights_R, const DispatchSaved& saved,
                         const Tensor& d_y_tD, Write write, const Tensor& d_weights_tK);

  /// Returns the part of this rank's window that receives rows, [R, D]. Passed as x_RD.plain of a dispatch, it saves
  /// copying them. The rows stay until the next dispatch of any layer. Undefined for other backends and other payloads.
  virtual Tensor rows_in_window(const Context& op, const DispatchSaved& saved) const;
  /// The same for d_out_RD.plain of combine_backward; the rows stay until the next combine_backward.
  virtual Tensor gradients_in_window(const Context& op, const DispatchSaved& saved) const;

  const DispatchOptions& options() const { return options_; }

 protected:
  /// Throws Error if so many rows cannot be counted.
  Dispatcher(const DispatchOptions& options, int num_ranks);

  int num_ranks() const { return num_ranks_; }
  std::int64_t num_local_experts() const { return options_.num_experts / num_ranks_; }
  /// Returns the number of rows that a rank's experts get when the load is balanced.
  double balanced_rows(std::int64_t num_tokens) const {
    return static_cast<double>(num_tokens * options_.top_k) / static_cast<double>(options_.num_domains);
  }

 private:
  /// Allocates offsets_e1 and weights_R.
  virtual void allocate_rows(const Context& op, DispatchSaved& saved) const;
  // The backend's part of each call, after the operands were checked. Also called when measuring.
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

  void check_tokens(const Tensor& y_tD, const DispatchSaved& saved) const;
  void check_payload(const GemmOperand& y_tD, PayloadPrecision precision, const DispatchSaved& saved) const;
  void check_rows(const GemmOperand& x_RD, const DispatchSaved& saved) const;

  DispatchOptions options_;
  int num_ranks_;
};

/// The groups of a rank for two-level. `all`: all ranks, cut into domains of equally many neighbours. `within`: this
/// rank's domain, whose ranks reach each other's memory. `across`: the ranks with this rank's place in each domain, in
/// the domains' order.
struct DomainGroups {
  ProcessGroup &all, &within, &across;
};

}  // namespace tessera
