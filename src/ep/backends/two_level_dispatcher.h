// The direct dispatcher over N domains of L ranks. The ranks of a domain, which is a node for instance, reach each
// other's memory. EP rank r = domain · L + place.
//
// A token crosses once to each domain that has one of its experts, by an all-to-all. It goes to the rank with its own
// rank's place there. From there, the domain's direct dispatcher brings it to the ranks of its experts. That dispatcher
// has N·T tokens per rank and E/N experts. Sums come back the same way.
//
// The device computes which tokens go where (ep/domain_plan.h). The ranks with one place tell each other how many
// tokens come. The host waits for these numbers, and then starts the all-to-alls. Expert ids cross with their tokens.
// Choices of other rounds cross as choices without an expert. The tokens that came lie one domain behind the other. The
// rest of the N·T tokens have no expert. On a GPU, such a dispatch copies 4·(2N + 1) bytes to the host, and nothing to
// the GPU.
//
// If there are two domains and room for any load, all tokens cross. Most must cross anyway: with experts chosen
// uniformly, all but 2^-K. Then nobody waits for numbers, and a step can be a graph.
#pragma once

#include "ep/backends/make_dispatcher.h"
#include "ep/host_numbers.h"
#include "ep/rows.h"

namespace tessera::ep {

class TwoLevelDispatcher : public Dispatcher {
 public:
  TwoLevelDispatcher(const DispatchOptions& options, const DomainGroups& groups, StepHook* hook);

  std::size_t window_bytes() const override { return within_->window_bytes(); }
  void allocate() override {
    within_->allocate();
    for_host_.allocate(options().device, 1 + 2 * num_domains());
  }
  int num_sms() const override { return within_->num_sms(); }
  bool waits_for_gpu() const override { return options().device == Device::kCuda && !sends_all(); }
  void check() override { within_->check(); }

 private:
  void allocate_rows(const Context& op, DispatchSaved& saved) const override;
  void allocate_backend(const Context& op, DispatchSaved& saved) const override;
  void do_dispatch(const Context& op, const GemmOperand& y_tD, const DispatchSaved& saved,
                   const GemmOperand& x_RD) override;
  void do_dispatch_again(const Context& op, const GemmOperand& y_tD, const DispatchSaved& saved,
                         const GemmOperand& x_RD) override;
  void do_combine(const Context& op, const Tensor& out_RD, const DispatchSaved& saved, const Tensor& y_tD,
                  Write write) override;
  void do_combine_backward(const Context& op, const GemmOperand& d_y_tD, const DispatchSaved& saved,
                           const GemmOperand& d_out_RD) override;
  void do_dispatch_backward(const Context& op, const Tensor& d_x_RD, const Tensor& d_weights_R,
                            const DispatchSaved& saved, const Tensor& d_y_tD, Write write,
                            const Tensor& d_weights_tK) override;
  Tensor do_rows_in_window(const Context& op, const DispatchSaved& saved) const override;
  Tensor do_gradients_in_window(const Context& op, const DispatchSaved& saved) const override;

  int num_domains() const { return groups_.across.size(); }
  /// Returns whether all tokens cross to every domain.
  bool sends_all() const { return num_domains() == 2 && !has_rounds(); }
  /// Returns t', the number of tokens that a rank has in the dispatch within the domain.
  std::int64_t num_tokens_within(const DispatchSaved& saved) const { return num_domains() * saved.num_tokens(); }
  /// Holds expert ids that are on their way, and how many tokens each domain sends.
  struct SentIds {
    Work work;
    Tensor num_received_N;
  };
  /// Computes what `saved` holds, except the weights, and sends the tokens' expert ids to their domains.
  SentIds plan(const Context& op, const DispatchSaved& saved);
  /// Returns the tokens' expert ids, without those whose rows are of other rounds, and assigns the number of rounds.
  /// `name` is for messages.
  Tensor round_ids(const Context& op, const DispatchSaved& saved, const Tensor& num_rounds_1, const std::string& name);
  /// Waits for the numbers of tokens and of rounds, and assigns them.
  void read_counts(const Context& op, const DispatchSaved& saved);
  /// Sends this rank's tokens to the domains of their experts. Returns the tokens [t', D] that other ranks have sent
  /// here, in scratch memory.
  GemmOperand exchange_tokens(const Context& op, const GemmOperand& y_tD, PayloadPrecision precision,
                              const DispatchSaved& saved, std::string_view operation);
  /// Sends rows of x, one per token, to the domains, and receives theirs.
  Work to_domains(const Context& op, const Tensor& x, const Tensor& received, const DispatchSaved& saved,
                  std::string_view operation);
  /// Sends the rows of x back to the ranks that they came from.
  Work from_domains(const Tensor& x, const Tensor& back, const DispatchSaved& saved, std::string_view operation);
  /// Sends the domains' sums x [t', D] to the ranks of their tokens. There they are added up and assigned or added to
  /// y_tD.
  void return_sums(const Context& op, const Tensor& x, const DispatchSaved& saved, const Tensor& y_tD, Write write,
                   std::string_view operation);

  DomainGroups groups_;
  std::unique_ptr<Dispatcher> within_;
  HostNumbers for_host_;
};

}  // namespace tessera::ep
