// The dispatcher whose ranks store into each other's windows, by the protocol of protocol.h. A rank sends no messages.
// It waits only for flags in its window, and what it must know of the others is there, too.
//
// In a dispatch, every rank stores its counts into every window. From all ranks' counts, a rank computes where its rows
// go on every other rank. They go to their expert's group, behind the rows of earlier ranks. A token crosses once per
// rank, into the first of its rows there. A record that names all its rows goes with it. The receiver copies the token
// into its other rows.
//
// In a combine, a rank sums the rows of every copy that came. It stores the sum into the window of the token's rank,
// which adds up the token's sums.
#pragma once

#include "ep/direct/direct_window.h"
#include "ep/placement.h"

namespace tessera::ep {

class DirectDispatcher : public WindowDispatcher {
 public:
  static constexpr DispatchBackend kBackend = DispatchBackend::kDirect;
  static constexpr std::array<BackendChoice, 2> kChoices = {
      {{"direct", "direct stores into the other ranks' memory"}, {"deepep", "the same stores"}}};

  DirectDispatcher(const DispatchOptions& options, ProcessGroup& group, StepHook* hook)
      : WindowDispatcher(options, group), hook_(hook) {}

 private:
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

  /// Makes the steps of a call. store(buffer) and read(buffer) make the steps of their kinds, for all ranks.
  template <typename Store, typename Read>
  void run(Call call, const DispatchSaved& saved, Store&& store, Read&& read);
  void signal(Flag flag, std::uint64_t epoch);
  void await(Call call, Flag flag, std::uint64_t epoch, const DispatchSaved& saved);

  void store_counts(const DispatchSaved& saved);
  /// Decides where this rank's copies go, and stores their records. The placement is cut to the round. next_row_E is
  /// scratch memory.
  void store_records(const Placement& placement, const Tensor& next_row_E, const DispatchSaved& saved);
  void store_tokens(const Payload& tokens, Buffer buffer, const DispatchSaved& saved);
  void read_records(const DispatchSaved& saved);
  /// Copies the rows that `buffer` has received to the rows of their experts.
  void deliver(const Context& op, Buffer buffer, const DispatchSaved& saved, const GemmOperand& x_RD);
  /// Stores the sums of the copies' rows into the windows of their tokens' ranks. If weights_R is null, all weights are
  /// 1.
  void store_sums(const Tensor& x_RD, const float* weights_R, const DispatchSaved& saved);
  void add_sums(const DispatchSaved& saved, const Tensor& y_tD, Write write);
  /// Makes dispatch_again and combine_backward.
  void send_tokens(Call call, Buffer buffer, PayloadPrecision precision, const Context& op, const GemmOperand& y_tD,
                   const DispatchSaved& saved, const GemmOperand& x_RD);

  StepHook* hook_;
  CallSequence sequence_;
};

}  // namespace tessera::ep
