// How tokens cross between domains, in front of a dispatcher within each domain.
//
// The P ranks of an expert-parallel group are cut into N domains of L ranks. The ranks of a domain, which is a node for
// instance, reach each other's memory. EP rank r = domain · L + place. A token crosses once to each domain that has
// one of its experts, by an all-to-all among the ranks that have the same place. The dispatcher within the domain then
// brings it to the ranks of its experts. For that dispatcher, a rank has the M = N·t tokens that came, and there are
// E/N experts. Sums come back the same way.
//
// The device computes which tokens go where (ep/domain_plan.h). Expert ids and weights cross with their tokens. What is
// sent has a part of t places per domain, and what comes has one, too. Tokens lie at the beginning of their part, and
// the other places have no expert. So all sizes are fixed, the host waits for no numbers, and a step can be a graph.
//
// Tokens cross before the first round of a layer, and sums after the last (ep/dispatcher.h). The ranks of one domain
// agree on its rounds, and other domains need not have as many.
//
// The places without a token do not cross on CPUs, nor on GPUs where NCCL can send what the device has counted
// (ProcessGroup::all_to_all_counted). Elsewhere they do. On GPUs, two domains always send each other whole parts: with
// experts chosen uniformly, all but 2^-K of the tokens must cross anyway.
#pragma once

#include "comm/process_group.h"
#include "ep/dispatcher.h"
#include "ep/domain_plan.h"

namespace tessera {

/// Holds what a layer keeps of its tokens' crossing. All tensors but those of the routings are int32.
struct DomainExchangeSaved {
  TokenRouting chosen;    // of this rank's t tokens, by the router
  TokenRouting within;    // of the M tokens that came: the ids are those of the domain's experts, or kNoExpert
  Crossing plan;          // of the t tokens
  Tensor num_received_N;  // the tokens that each domain sends here
};

/// Its calls are named like those of the dispatcher that they belong to. All ranks make them in the same order. Shapes:
/// x_tD are of this rank's tokens, and x_MD of those that came.
class DomainExchange {
 public:
  /// `options` are those of all E experts. `across` has the ranks with this rank's place, in the order of the domains,
  /// and must outlive this.
  DomainExchange(const DispatchOptions& options, int num_ranks, ProcessGroup& across)
      : options_(options), num_ranks_(num_ranks), across_(across) {}
  /// Gives back what allocate() has taken. All ranks must do so together, as with the dispatcher's windows.
  ~DomainExchange();
  DomainExchange(const DomainExchange&) = delete;
  DomainExchange& operator=(const DomainExchange&) = delete;

  /// Returns the options of the dispatcher within a domain.
  DispatchOptions options_within() const;
  /// Takes memory for what GPUs send between more than two domains (ProcessGroup::open_counted). All ranks must call it
  /// together.
  void allocate();
  /// Returns the bytes that allocate() may take.
  std::size_t window_bytes() const;
  void set_turns(Turns* turns) { turns_ = turns; }

  DomainExchangeSaved allocate_saved(const Context& op, const TokenRouting& chosen) const;
  /// Allocates x_MD in the form in which tokens of this precision cross.
  GemmOperand allocate_tokens(const Context& op, const DispatchSaved& saved, PayloadPrecision precision) const;

  /// Assigns the tokens that other ranks send, and what is saved.
  void dispatch(const Context& op, const GemmOperand& y_tD, const DispatchSaved& saved, const GemmOperand& y_MD);
  /// Assigns the same tokens once more, for recomputation.
  void dispatch_again(const Context& op, const GemmOperand& y_tD, const DispatchSaved& saved, const GemmOperand& y_MD);
  /// Assigns or adds to y_tD the sum over the domains of what combine has given there.
  void combine(const Context& op, const Tensor& y_MD, const DispatchSaved& saved, const Tensor& y_tD, Write write);
  void combine_backward(const Context& op, const GemmOperand& d_y_tD, const DispatchSaved& saved,
                        const GemmOperand& d_y_MD);
  /// Assigns or adds to d_y_tD as combine does. Assigns the weights' gradients (float32) to d_weights_tK.
  void dispatch_backward(const Context& op, const Tensor& d_y_MD, const Tensor& d_weights_MK,
                         const DispatchSaved& saved, const Tensor& d_y_tD, Write write, const Tensor& d_weights_tK);

 private:
  int num_domains() const { return across_.size(); }
  /// Returns the bytes of a domain's part of the largest tensor that crosses.
  std::size_t part_bytes() const;
  /// Decides which tokens go where, and tells the other domains how many come.
  void plan(const Context& op, const DispatchSaved& saved);
  /// Sends rows of x, one per token, to the domains, and receives theirs.
  Work to_domains(const Context& op, const Tensor& x, const Tensor& received, const DispatchSaved& saved,
                  std::string_view operation);
  /// Starts to send the tokens y_tD in the form of y_MD.
  std::array<Work, 2> start_tokens(const Context& op, const GemmOperand& y_tD, PayloadPrecision precision,
                                   const DispatchSaved& saved, const GemmOperand& y_MD, std::string_view operation);
  /// Implements dispatch_again and combine_backward.
  void send_tokens(const Context& op, const GemmOperand& y_tD, PayloadPrecision precision, const DispatchSaved& saved,
                   const GemmOperand& y_MD, const char* call, std::string_view operation);
  /// Sends the rows of x back to the ranks that they came from.
  Work from_domains(const Tensor& x, const Tensor& back, const DispatchSaved& saved, std::string_view operation);
  /// Sends the domains' sums x_MD to the ranks of their tokens. There they are added up and assigned or added to y_tD.
  void return_sums(const Context& op, const Tensor& x_MD, const DispatchSaved& saved, const Tensor& y_tD, Write write,
                   std::string_view operation);
  void give_way() {
    if (turns_ != nullptr) turns_->give_way();
  }

  DispatchOptions options_;
  int num_ranks_;  // P
  ProcessGroup& across_;
  bool is_open_ = false;  // across_, for counted rows
  Turns* turns_ = nullptr;
};

}  // namespace tessera
