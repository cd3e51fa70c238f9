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
#include "ep/protocol.h"
#include "ops/routing/permute.h"

namespace tessera {

struct DispatchSaved;

enum class DispatchBackend { kLocal, kStandard, kDirect };

enum class PayloadPrecision { kDefault, kMxfp8 };

/// Multiprocessors for a call of direct: found by measurement (docs/performance.md).
inline constexpr int kDefaultSms = 24;

struct DispatchOptions {
  std::int64_t max_tokens = 0;  // the largest T
  std::int64_t dim = 0;
  std::int64_t num_experts = 0;  // E
  std::int64_t top_k = 0;        // K
  /// More than one, for direct: the E experts are those of one of so many domains, over which a token's K choices are
  /// spread. A choice that is of another domain has expert id kNoExpert, no row, and a weight that is not read;
  /// its gradient is undefined.
  std::int64_t num_domains = 1;
  DType dtype = DType::kFloat32;
  /// The largest that a layer has.
  std::int64_t max_alignment = 1;
  /// Rows that a rank has room for, as a multiple of those of a balanced load, T·K (of several domains, their number's
  /// part of that); 0: for any load. Tokens are never dropped: more rows than that are an error.
  double capacity_factor = 0.0;
  PayloadPrecision dispatch_forward = PayloadPrecision::kDefault;
  PayloadPrecision combine_backward = PayloadPrecision::kDefault;
  /// Where tensors are, for direct: kCpu or kCuda.
  Device device = Device::kCpu;
  /// Of a GPU, that a call of direct takes; at least 2.
  int num_sms = kDefaultSms;
};

/// How a layer's rows are laid out.
struct DispatchLayer {
  std::string_view name;  // in messages; outlives what is saved
  std::int64_t alignment = 1;
};

/// What a router gives for the t tokens of this rank.
struct TokenRouting {
  Tensor expert_ids_tK;  // int32, those of a token different
  Tensor weights_tK;     // float32
  Tensor counts_E;       // int32: (token, k) pairs per expert
};

namespace ep {

// What each backend keeps of a dispatch. int32; a slot is t·K + k, -1 is none.

struct LocalRouting {
  Tensor slot_of_row_R, row_of_slot_tK;
};

/// Sent: this rank's slots sorted by expert. Received: rows by source rank, then expert, then token.
struct StandardRouting {
  Tensor slot_of_sent_tK, sent_of_slot_tK;
  Tensor source_of_row_R, row_of_received_R;
  /// Rows to each rank and from it, on the host, which drives the collectives.
  struct Counts {
    std::vector<std::int64_t> num_sent_P, num_received_P;
  };
  std::shared_ptr<Counts> counts;
};

struct DirectRouting {
  /// This rank's tokens: the ranks that they go to, ascending, and their first row there.
  Tensor rank_tJ, first_row_tJ;
  /// The copies that came: how many, where each one's sum goes, and its rows (those of `rows_Q1`) with their slots, in
  /// the order of k.
  Tensor num_copies_1, home_Q, place_Q, rows_Q1, row_of_choice_R, slot_of_choice_R;
  /// The row that holds a row's token: itself, or the copy's first.
  Tensor source_of_row_R;
};

/// The same on GPUs, P ranks.
struct GpuDirectRouting {
  Tensor rank_tJ, first_row_tJ;
  /// The copies that came: which of its token's copies each is, in the order of ranks; -1: none. Of those that are
  /// there, the rows of the token's choices, -1 for those on other ranks.
  Tensor place_Pt, row_PtK;
  Tensor source_of_row_R;
  /// Where the rows of the i-th local expert end, and its padding begins.
  Tensor ends_e;
};

/// Of two-level, N domains. It exchanges up to N·t tokens between domains each way, a token once with each domain.
struct TwoLevelRouting {
  /// This rank's tokens as they are sent, domain by domain: which they are.
  Tensor token_of_sent_Nt;
  /// The place of a token among those sent to a domain; N·T: it is not sent there. The place of a choice's number among
  /// the numbers, K each, that come back for those.
  Tensor sent_of_token_tN, number_of_slot_tK;
  /// Tokens to each domain and from it, on the host.
  struct Counts {
    std::vector<std::int64_t> num_sent_N, num_received_N;
  };
  std::shared_ptr<Counts> counts;
  /// Of the dispatch within the domain, of the tokens that have come; it holds its routing, T' = N·T.
  std::shared_ptr<DispatchSaved> within;
};

}  // namespace ep

/// What a layer keeps from its dispatch for the other calls. Holds the routing's tensors, which must live as long.
struct DispatchSaved {
  DispatchLayer layer;
  TokenRouting routing;
  // From dispatch.
  Tensor offsets_e1;  // int32: rows [offsets[i], offsets[i + 1]) are the i-th local expert's
  Tensor weights_R;   // float32: a row's routing weight, 0 for all that are padding
  std::variant<ep::LocalRouting, ep::StandardRouting, ep::DirectRouting, ep::GpuDirectRouting, ep::TwoLevelRouting>
      backend;

  std::int64_t num_tokens() const { return routing.expert_ids_tK.dim(0); }
  std::int64_t num_rows() const { return weights_R.dim(0); }
  /// offsets_e1's last number, [1].
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

  /// Memory of this rank besides the arena's, which allocate() takes.
  virtual std::size_t window_bytes() const { return 0; }
  /// Together with all ranks, before the first call that does not measure. Throws Error if there is no such memory.
  virtual void allocate() {}
  /// SMs of a GPU that a call takes, while others are free for other work; 0: all of them, for a short time.
  virtual int num_sms() const { return 0; }
  /// Whether calls wait for the GPU, and so cannot be parts of a graph.
  virtual bool waits_for_gpu() const { return false; }
  /// Throws what a GPU's calls up to now would have thrown: once for too many rows, where combine gave NaN; again
  /// and again for a rank that did not come, after which calls do nothing.
  virtual void check() {}

  std::int64_t max_rows(std::int64_t num_tokens, std::int64_t alignment) const;
  /// Memory for what a layer keeps, from op's arena.
  DispatchSaved allocate_saved(const Context& op, const DispatchLayer& layer, const TokenRouting& routing) const;

  /// x_RD (=) the rows, padding 0, in those of its forms that are defined, and what is saved from the routing. Where
  /// the payload has x_RD.rows' format, these are the very bytes that were sent. Throws Error, on all ranks, if a rank
  /// gets more rows than it has room for; the calls of that layer that follow are then not to be made.
  void dispatch(const Context& op, const GemmOperand& y_tD, const DispatchSaved& saved, const GemmOperand& x_RD);
  /// The same rows once more, for recomputation.
  void dispatch_again(const Context& op, const GemmOperand& y_tD, const DispatchSaved& saved, const GemmOperand& x_RD);
  /// y_tD[t] (= or +=) the sum of weight · row of out_RD over the token's rows.
  void combine(const Context& op, const Tensor& out_RD, const DispatchSaved& saved, const Tensor& y_tD, Write write);
  /// d_out_RD (=) the gradient of out_RD without the weight, which comes in with SwiGLU's backward; padding 0. In the
  /// forms that are defined.
  void combine_backward(const Context& op, const GemmOperand& d_y_tD, const DispatchSaved& saved,
                        const GemmOperand& d_out_RD);
  /// d_y_tD[t] (= or +=) the sum of the token's rows of d_x_RD; d_weights_tK (=) their numbers of d_weights_R
  /// (float32).
  void dispatch_backward(const Context& op, const Tensor& d_x_RD, const Tensor& d_weights_R, const DispatchSaved& saved,
                         const Tensor& d_y_tD, Write write, const Tensor& d_weights_tK);

  /// Where rows come into this rank's window, [R, D]: as x_RD.plain of a dispatch they need not be copied out of it.
  /// They are the layer's until the next dispatch, of any layer. Undefined where there is no such place: other
  /// backends, and other payloads.
  virtual Tensor rows_in_window(const Context& op, const DispatchSaved& saved) const;
  /// The same for d_out_RD.plain of combine_backward, until the next one.
  virtual Tensor gradients_in_window(const Context& op, const DispatchSaved& saved) const;

  const DispatchOptions& options() const { return options_; }

 protected:
  /// Throws Error if so many rows cannot be counted.
  Dispatcher(const DispatchOptions& options, int num_ranks);

  int num_ranks() const { return num_ranks_; }
  std::int64_t num_local_experts() const { return options_.num_experts / num_ranks_; }
  /// That a rank's experts get of a balanced load.
  double balanced_rows(std::int64_t num_tokens) const {
    return static_cast<double>(num_tokens * options_.top_k) / static_cast<double>(options_.num_domains);
  }

 private:
  /// offsets_e1 and weights_R.
  virtual void allocate_rows(const Context& op, DispatchSaved& saved) const;
  // The calls, after their operands have been checked; also when measuring.
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

/// A rank's groups for two-level: all ranks, which are cut into domains of neighbours, all of one size; those of its
/// own domain, which reach each other's memory; and those with its place in each of the domains, in their order.
struct DomainGroups {
  ProcessGroup &all, &within, &across;
};

}  // namespace tessera
