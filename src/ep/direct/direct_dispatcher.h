// The dispatcher whose ranks store into each other's windows, by the protocol of protocol.h. No host of a rank waits
// for another's; what a rank must know of the others is in its window.
//
// A dispatch: every rank stores its counts into every window, and from all ranks' counts computes where its rows go in
// every other rank's: at their expert's, behind the rows of earlier ranks. A token crosses once per rank, into the
// first of its rows there, with a record that names all of them; the receiver copies it into the others. A combine: for
// every copy that came, its rank stores the sum of the copy's rows into the window of the token's rank, which adds up
// the token's sums.
#pragma once

#include "ep/direct/direct_window.h"
#include "ep/placement.h"

namespace tessera::ep {

class DirectDispatcher : public WindowDispatcher {
 public:
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

  /// Takes the steps of a call; store(buffer) and read(buffer) do those of these kinds, for all ranks.
  template <typename Store, typename Read>
  void run(Call call, const DispatchSaved& saved, Store&& store, Read&& read);
  void signal(Flag flag, std::uint64_t epoch);
  void await(Call call, Flag flag, std::uint64_t epoch, const DispatchSaved& saved);

  void store_counts(const DispatchSaved& saved);
  /// Decides where this rank's copies go, and stores their records; next_row_E is scratch. For no copies at all if
  /// `nothing`: where there is no room.
  void store_records(const Placement& placement, const Tensor& next_row_E, bool nothing, const DispatchSaved& saved);
  void store_tokens(const Payload& tokens, Buffer buffer, const DispatchSaved& saved);
  void read_records(const DispatchSaved& saved);
  /// Without weights all are 1.
  void store_sums(const Tensor& x_RD, const float* weights_R, const DispatchSaved& saved);
  void add_sums(const DispatchSaved& saved, const Tensor& y_tD, Write write);
  /// What dispatch_again and combine_backward do.
  void send_tokens(Call call, Buffer buffer, PayloadPrecision precision, const Context& op, const GemmOperand& y_tD,
                   const DispatchSaved& saved, const GemmOperand& x_RD);

  StepHook* hook_;
  CallSequence sequence_;
};

}  // namespace tessera::ep
